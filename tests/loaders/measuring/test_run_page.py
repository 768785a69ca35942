"""The page of a run: what the stats, a benchmark, a disk's profile and a trace say, as pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import prep_here
from disk_profiles import full_profile

from shardprep.formats.errors import DataError
from shardprep.loaders import EvalTransform, FakeData, Flow, Loader
from shardprep.loaders.measuring import tracing
from shardprep.loaders.measuring.pages.run_page import run_page

HOSTILE = "</title><script>alert(1)</script>\u202e" + "x" * 3000
SWEEP = [(1, 100.0), (2, 198.0), (4, 200.0), (8, 150.0)]


def course(count: int) -> list[dict[str, float]]:
    part = {"seconds": 0.5, "batches": 3, "rows": 30, "ready": 4.5, "waited": 0.1}
    return [{"began": number / 2, **part} for number in range(count)]


def stage(name: str, share: float) -> dict[str, Any]:
    waits = {"starved": 0.0, "blocked": 0.1, "seconds": 0.002, "limit": None}
    return {"name": name, "place": "worker", "utilisation": share, **waits}


def stats(limit: str = "decode", **more: Any) -> dict[str, Any]:
    verdict = {"limit": limit, "rate": 1234.5, "unit": "images", "sentence": f"{limit} limits"}
    return {"loads": [stage("read", 0.1), stage(limit, 0.8)], "verdict": verdict, **more}


def bench(**more: Any) -> dict[str, Any]:
    runs = [{"value": value, "images_per_second": rate} for value, rate in SWEEP]
    figures = {"first_batch": 1.5, "gap_p50": 0.1, "gap_p99": 0.2, "bytes_per_second": 5e7}
    return {
        "stats": stats(),
        "sweep": {"option": "batch_size", "runs": runs},
        "disk": None,
        **figures,
        **more,
    }


def test_the_limit_is_marked_and_the_course_is_drawn() -> None:
    page = run_page(stats(course=course(20), warming=0.5), name="lmdb/train")

    (marked,) = [part for part in page.split("<li")[1:] if 'class="limits"' in part]
    assert "decode" in marked
    assert "<strong>limits</strong>" in marked
    assert "lmdb/train</bdi>: 1,234 images/s" in page
    assert all(f"<figcaption>{title}<" in page for title in ("Rate", "Queue", "Waiting of the step"))
    assert "<td>4.5</td>" in page
    assert not any(title in page for title in ("Sweep", "Disk", "Timeline"))


def test_a_sweep_has_its_knee_and_the_disk_lies_beside_the_run() -> None:
    page = run_page(bench(), disk=full_profile().to_json())

    assert "batch size 2 reaches 198 images/s, 99 % of the most" in page
    assert ">enough</text>" in page
    assert "after 1.50 s" in page
    assert all(row in page for row in ("this run, as delivered", "random, 16 at once, cold", "200.0 MB/s"))


def test_hostile_values_stay_bounded_text() -> None:
    trace = {"traceEvents": [
        {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": HOSTILE}},
        {"ph": "X", "cat": "stage", "name": HOSTILE, "tid": 1, "ts": 5, "dur": 10},
    ]}  # fmt: skip
    page = run_page(stats(HOSTILE), name=HOSTILE, trace=trace)

    assert "<script" not in page
    assert "\u202e" not in page
    assert len(page) < 40_000
    assert page == run_page(stats(HOSTILE), name=HOSTILE, trace=trace)


@pytest.mark.parametrize(
    "change",
    [
        {"sweep": {"option": "workers", "runs": []}},
        {"sweep": {"option": 1, "runs": [{"value": 1, "images_per_second": 2}]}},
        {"sweep": [1]},
        {"first_batch": "soon"},
        {"disk": {"cold": 1}},
        {"stats": stats(course=[{"began": 0}])},
        {"stats": stats(course=[*course(3)[:1], {"began": -1}])},
    ],
)
def test_values_of_another_form_are_a_data_error(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        run_page(bench(**change))


@pytest.mark.parametrize("trace", [1, {}, {"traceEvents": [{"ph": "X"}]}, {"traceEvents": 3}])
def test_another_file_than_a_trace_is_a_data_error(trace: Any) -> None:
    with pytest.raises(DataError):
        run_page(stats(), trace=trace)


def test_the_stats_of_all_have_a_page(tmp_path: Path) -> None:
    with FakeData(6, batch_size=4, size=(8, 8), seconds=0.01) as data, Flow.from_iterable(range(9)) as flow:
        assert "nothing is known yet" in data.stats().to_html()
        for source in (data, flow):
            for _ in source:
                pass
        page = data.stats().to_html(tmp_path / "page.html", name="fake")
        assert "items/s" in flow.stats().to_html()

    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert "fake</bdi>: " in page
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.slow
def test_the_commands_write_the_page_of_a_run(lmdb_shards: Path, tmp_path: Path) -> None:
    with (
        Loader(lmdb_shards, batch_size=4, transform=EvalTransform(32), workers=1) as loader,
        tracing(loader) as trace,
    ):
        for _ in loader:
            pass
    (tmp_path / "stats.json").write_text(json.dumps(loader.stats().to_dict()))
    trace.save(tmp_path / "trace.json")
    full_profile().save(tmp_path / "disk.json")
    words = [
        "--trace",
        tmp_path / "trace.json",
        "--disk",
        tmp_path / "disk.json",
        "-o",
        tmp_path / "page.html",
    ]

    done = prep_here("report", "--run", tmp_path / "stats.json", *words)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    words = ["--seconds", "0.1", "--workers", "0", "--batch-size", "4", "--size", "32", "--json"]
    benched = prep_here("bench-loader", lmdb_shards, *words, "--html", tmp_path / "bench.html")

    assert done.returncode == benched.returncode == 0, done.stderr + benched.stderr
    assert all(word in page for word in ("Timeline", "worker 0", "Disk", "random, 16 at once", "Stages"))
    assert str(lmdb_shards) in (tmp_path / "bench.html").read_text(encoding="utf-8")
    assert json.loads(benched.stdout)["stats"]["course"]


@pytest.mark.parametrize(
    "words",
    [[], ["--run", "stats.json", "folder"], ["folder", "--trace", "t.json"]],
    ids=["none", "both", "trace"],
)
def test_a_report_is_of_a_dataset_or_of_a_run(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    done = prep_here(
        "report", *(tmp_path / w if w == "folder" else w for w in words), "-o", tmp_path / "p.html"
    )

    assert done.returncode == 2
    assert "--run STATS.json" in done.stderr
