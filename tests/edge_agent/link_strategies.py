"""Links for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from edge_agent.bench.link import Cut, Link, RateChange

#: Bits per second, or no limit.
RATES = st.none() | st.floats(1e3, 1e9)
SECONDS = st.just(0.0) | st.floats(1e-6, 5.0)


@st.composite
def links(draw: st.DrawFn, rates: st.SearchStrategy[float | None] = RATES) -> Link:
    """Any link, with and without a schedule of rates."""
    moments = draw(st.lists(st.floats(0.01, 500.0), max_size=6, unique=True))
    changes = tuple(RateChange(at, draw(rates), draw(rates)) for at in sorted(moments))
    repeat = 0.0
    if changes and draw(st.booleans()):
        repeat = changes[-1].at_s + draw(st.floats(0.01, 100.0))
    cuts = draw(st.lists(st.floats(0.0, 500.0), max_size=4, unique=True))
    return Link(
        draw(rates),
        draw(rates),
        draw(SECONDS),
        draw(SECONDS),
        draw(SECONDS),
        draw(st.floats(0.0, 1.0)),
        draw(SECONDS),
        changes,
        repeat,
        tuple(Cut(at, draw(SECONDS)) for at in sorted(cuts)),
    )
