"""Who gets a message: the subscription table of the in-memory broker (MQTT 5, 4.7 and 4.8.2)."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from broker.filters import Filter, levels_match, parse_filter

Client = TypeVar("Client", bound=Hashable)


@dataclass
class _Subscription(Generic[Client]):
    """One filter and the QoS of each subscriber; ``turn``: whose turn it is in a share group."""

    filter: Filter
    qos: dict[Client, int] = field(default_factory=dict)
    turn: int = 0

    def next_member(self) -> Client:
        members = list(self.qos)
        self.turn = (self.turn + 1) % len(members)
        return members[self.turn]


class SubscriptionTable(Generic[Client]):
    """Filters, their subscribers, and a bounded memory of which topic reaches which filters."""

    def __init__(self, max_routes: int = 10_000) -> None:
        self._subscriptions: dict[str, _Subscription[Client]] = {}
        self._routes: dict[str, list[_Subscription[Client]]] = {}
        self._max_routes = max_routes

    def add(self, client: Client, topic_filter: str, qos: int, first_turn: int = 0) -> Filter:
        """Subscribe, or change the QoS. ``first_turn``: where a new share group begins."""
        subscription = self._subscriptions.get(topic_filter)
        if subscription is None:
            subscription = _Subscription(parse_filter(topic_filter), turn=first_turn)
            self._subscriptions[topic_filter] = subscription
            self._routes.clear()
        subscription.qos[client] = qos
        return subscription.filter

    def remove(self, client: Client, topic_filter: str) -> None:
        """Unsubscribe; no error where there is nothing to remove."""
        subscription = self._subscriptions.get(topic_filter)
        if subscription is None or subscription.qos.pop(client, None) is None:
            return
        if not subscription.qos:
            del self._subscriptions[topic_filter]
            self._routes.clear()

    def recipients(self, topic: str) -> Iterator[tuple[Client, int]]:
        """Each client that gets a message to ``topic``, and the QoS granted to it.

        One copy per client, however many of its filters match (3.3.4), and one more for each
        share group whose turn it is.
        """
        plain: dict[Client, int] = {}
        for subscription in self._route(topic):
            if subscription.filter.group is None:
                for client, granted in subscription.qos.items():
                    plain[client] = max(plain.get(client, 0), granted)
            else:
                member = subscription.next_member()
                yield member, subscription.qos[member]
        yield from plain.items()

    def _route(self, topic: str) -> list[_Subscription[Client]]:
        route = self._routes.get(topic)
        if route is None:
            levels = topic.split("/")
            table = self._subscriptions.values()
            route = [item for item in table if levels_match(item.filter.levels, levels)]
            if len(self._routes) >= self._max_routes:
                self._routes.clear()
            self._routes[topic] = route
        return route
