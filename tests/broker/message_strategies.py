"""Hypothesis strategies for every message that the codec knows."""

from __future__ import annotations

from hypothesis import strategies as st

from broker.figures import BUCKETS
from broker.messages import (
    FINISHES,
    MAX_DETAIL,
    MAX_POSITION,
    MAX_TOKEN,
    VERIFY_MODES,
    Accepted,
    Close,
    Closed,
    DeviceStatus,
    DraftBatch,
    Refused,
    Resync,
    SessionOpen,
    Verdict,
    VerifierStatus,
)
from broker.sampling import MAX_SEED, Sampling
from broker.telemetry import CONFIG_SCHEMA, DeviceConfig, Histogram, Telemetry

counts = st.integers(0, 200) | st.integers(0, MAX_POSITION)
tokens = st.lists(st.integers(0, MAX_TOKEN) | st.integers(0, 300), max_size=40).map(tuple)
some_tokens = st.lists(st.integers(0, MAX_TOKEN), min_size=1, max_size=40).map(tuple)
short = st.text(max_size=64)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.0, 100.0),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, MAX_SEED),
)
opens = st.builds(
    SessionOpen,
    attach=counts,
    prompt=some_tokens,
    committed=tokens,
    sampling=samplings,
    max_tokens=st.integers(1, MAX_POSITION),
    vocab_hash=short,
    verify=st.sampled_from(VERIFY_MODES),
    ask=st.booleans(),
)


@st.composite
def drafts(draw: st.DrawFn) -> DraftBatch:
    chosen = draw(tokens)
    parents = None
    if draw(st.booleans()):
        parents = tuple(draw(st.integers(-1, index - 1)) for index in range(len(chosen)))
    verify = draw(st.booleans()) or not chosen
    go_on = verify and draw(st.booleans())
    return DraftBatch(draw(counts), draw(counts), draw(counts), chosen, parents, verify, go_on)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    chosen = draw(some_tokens)
    judged = draw(st.integers(0, 50))
    return Verdict(
        draw(counts),
        draw(counts),
        draw(counts),
        chosen,
        draw(st.integers(0, min(judged, len(chosen)))),
        judged,
        draw(st.sampled_from([None, *FINISHES])),
        draw(st.integers(0, 10**9)) / 10,  # tenths: what the wire carries
        draw(st.integers(0, 10**6)) / 10,
    )


numbers = st.floats(allow_nan=False) | st.integers(0, 2**53).map(float)
histograms = st.builds(
    Histogram,
    counts=st.just(()) | st.lists(counts, min_size=len(BUCKETS) + 1, max_size=len(BUCKETS) + 1),
    total=st.floats(0.0, 1e300),
)
ratios = st.floats(0.0, 1.0)
of_a_device = (
    st.builds(
        Telemetry,
        boot=short,
        sequence=counts,
        clock=numbers,
        figures=st.dictionaries(counts, numbers, max_size=60),
        ttft=histograms,
        tpt=histograms,
        version=short,
        draft=short,
        policy=short,
        machine=short,
        energy_source=short,
    ),
    st.builds(
        DeviceConfig,
        version=counts,
        r1=ratios,
        r2=ratios,
        window=st.integers(0, 512),
        policy=short,
        schema=st.integers(0, CONFIG_SCHEMA + 1),
    ),
)
messages = st.one_of(
    *of_a_device,
    opens,
    drafts(),
    verdicts(),
    st.builds(Accepted, counts, short, counts, counts),
    st.builds(Refused, counts, short, st.text(max_size=MAX_DETAIL), st.floats(0.0, 86_400.0)),
    st.builds(Resync, counts, counts, counts, counts, tokens),
    st.builds(Close, counts),
    st.builds(Closed, counts, short),
    st.builds(
        VerifierStatus, st.booleans(), short, st.text(max_size=200), short, counts, counts, counts
    ),
    st.builds(DeviceStatus, st.booleans(), short, st.text(max_size=200)),
)
