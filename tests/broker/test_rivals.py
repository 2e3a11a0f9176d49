"""(9) When it is certain that another client uses our id, and who of the two gives up."""

from __future__ import annotations

from broker.rivals import STRONG, WEAK, WINDOW, RivalWatch


def reconnect(watch: RivalWatch, *, taken_over: bool = False) -> str:
    mark = watch.new_link(taken_over)
    watch.link_up()
    return mark


def evidence_until_certain(watch: RivalWatch, mark: str, step: float = 1.0) -> int | None:
    """Connections until the watch is certain, each of which hears ``mark``; at most 20."""
    now = 0.0
    for count in range(1, 21):
        reconnect(watch)
        now += step
        if watch.heard(mark, False, now):
            return count
    return None


def test_earlier_process_is_no_rival() -> None:
    watch = RivalWatch("5")
    reconnect(watch)
    assert not any(watch.heard("1.7", True, now) for now in range(20))


def test_younger_gives_up_first() -> None:
    for own, rival, wanted in (("5", "1", STRONG), ("5", "9", 2 * STRONG)):
        watch = RivalWatch(own)
        reconnect(watch)
        assert evidence_until_certain(watch, f"{rival}.1") == wanted


def test_old_evidence_does_not_count() -> None:
    watch = RivalWatch("5")
    reconnect(watch)
    assert evidence_until_certain(watch, "1.1", step=WINDOW) is None


def test_one_connection_is_one_piece_of_evidence() -> None:
    watch = RivalWatch("5")
    reconnect(watch)
    reconnect(watch)
    assert not any(watch.heard("1.1", is_will, 1.0) for is_will in (False, True) * 10)
    # A takeover that the broker named is already counted.
    assert not watch.taken_over(2.0)
    reconnect(watch, taken_over=True)
    assert not watch.heard("1.1", False, 3.0)
    assert watch.taken_over(4.0)


def test_own_traces_are_harmless() -> None:
    watch = RivalWatch("5")
    earlier = reconnect(watch)
    for now in range(10):
        mark = reconnect(watch)
        assert not watch.heard(earlier, True, now), "the will of our half-open connection"
        assert not watch.heard(mark, False, now), "our birth"
        assert not watch.heard(None, True, now), "somebody without marks"
        earlier = mark


def test_will_of_the_living_connection_is_weak_evidence() -> None:
    watch = RivalWatch("5")
    for now in range(1, WEAK + 1):
        assert watch.heard(reconnect(watch), True, float(now)) == (now == WEAK)


def test_marks_that_are_not_ours_do_no_harm() -> None:
    watch = RivalWatch("5")
    reconnect(watch)
    reconnect(watch)
    for mark in ("", ".", "5", "5.", "5.x", "\u2603.1"):
        assert not watch.heard(mark, True, 1.0)
