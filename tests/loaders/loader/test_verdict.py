"""The verdict: it names the stage that was made slow, every time, and is always consistent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shardprep.loaders import LoaderStats
from shardprep.loaders.loader.ahead import StorageCounts
from shardprep.loaders.loader.stats import STEP

SECONDS = st.just(0.0) | st.floats(1e-6, 1e4)


@st.composite
def times(draw: st.DrawFn) -> LoaderStats:
    """Any times that clocks can show: they need not be consistent."""
    timed = draw(st.integers(0, 10**6))
    return stats_of(
        rows=timed + draw(st.integers(0, 10**4)),
        timed=timed,
        image_bytes=draw(st.floats(0, 1e6)),
        workers=draw(st.integers(0, 64)),
        cpus=draw(st.integers(1, 64)),
        stages={name: draw(SECONDS) for name in ("read", "decode", "augment")},
        storage=StorageCounts(waited=draw(SECONDS)),
        **{name: (draw(SECONDS),) for name in ("filling", "cpu", "queued")},
        **{name: draw(SECONDS) for name in ("elapsed", "blocked", "starved", "handing")},
    )


@given(stats=times())
def test_every_verdict_is_a_sentence_with_the_limit_and_plain_json(stats: LoaderStats) -> None:
    verdict = stats.verdict

    assert (verdict is None) == (not stats.timed or not stats.elapsed)
    if verdict:
        assert str(verdict).startswith(f"{verdict.limit} limits, at ")
        assert "inf" not in str(verdict)
        assert "nan" not in str(verdict)
        assert verdict.next_rate >= verdict.rate
        assert json.loads(json.dumps(verdict.to_dict(), allow_nan=False))["sentence"] == str(verdict)


def stats_of(**changes: Any) -> LoaderStats:
    """A thousand images in ten seconds, by two workers on two CPUs that decode all the time."""
    whole = LoaderStats(
        rows=1000,
        timed=1000,
        batches=10,
        elapsed=10.0,
        warming=0.0,
        starved=9.5,
        handing=0.1,
        blocked=0.0,
        filling=(10.0, 10.0),
        waiting=(0.0, 0.0),
        cpu=(19.0,),
        queued=(0.5,),
        stages={"read": 1.0, "decode": 16.0, "augment": 2.0},
        copied=0,
        restarts=0,
        workers=2,
        cpus=2,
        image_bytes=1e5,
        crop_ready=1.0,
    )
    return replace(whole, **changes)


READING = {"read": 18.0, "decode": 1.0, "augment": 0.5}


@pytest.mark.parametrize(
    ("changes", "limit", "says"),
    [
        ({}, "decode", "all 2 CPUs are in use, so more workers do not help"),
        ({"cpus": 8}, "decode", "more workers help: 8 instead of 2 would reach about 400 images/s"),
        ({"cpu": (9.0,), "queued": (10.0,)}, "decode", "wait for a CPU 53% of the time"),
        ({"stages": READING, "cpu": (2.0,), "queued": (0.1,)}, "read", "the storage delivers 10 MB/s"),
        ({"starved": 0.2}, STEP, "a faster loader would gain nothing"),
        ({"starved": 0.2, "handing": 9.0}, "hand-over", "make batches larger"),
        (
            {"starved": 3.0, "storage": StorageCounts(waited=6.0)},
            "storage",
            "downloads 60% of the time; a faster link",
        ),
        ({"starved": 7.0, "storage": StorageCounts(waited=2.0)}, "decode", "more workers do not help"),
        ({"starved": 0.1, "storage": StorageCounts(waited=0.5)}, STEP, "a faster loader would gain nothing"),
        ({"workers": 0, "filling": (9.5,)}, "decode", "set workers to 1 or more"),
        (
            {"cpu": (10.0,), "queued": (1.0,)},
            "decode",
            "more workers help: 3 instead of 2 would reach about 150",
        ),
        ({"cpu": (4.0,), "queued": (9.0,)}, "decode", "wait for a CPU 69% of the time"),
        ({"cpu": (3.0,)}, "decode", "the workers wait in this stage instead of computing; more workers help"),
        ({"stages": {"read": 1.0, "decode": 2.0, "augment": 1.0}}, "transport", "more workers do not help"),
    ],
)
def test_the_figures_lead_to_the_advice(changes: dict[str, Any], limit: str, says: str) -> None:
    verdict = stats_of(**changes).verdict

    assert verdict is not None
    assert (verdict.limit, says in verdict.advice) == (limit, True), str(verdict)
