"""Stats as pictures: the page of a run, and the stages as a small chart in a notebook."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats.errors import DataError
from shardprep.formats.runtime.json_record import read_json_file
from shardprep.loaders import EvalTransform, FakeData, Loader
from shardprep.loaders.loader.run_page import RunValues, run_page
from shardprep.loaders.measuring import tracing
from support.datasets import prep_here
from support.disk_profiles import full_profile
from support.run_figures import bench, course, stats

CHANGES: list[dict[str, Any]] = [
    {"sweep": {"option": "workers", "runs": []}},
    {"sweep": {"option": 1, "runs": [{"value": 1, "images_per_second": 2}]}},
    {"sweep": [1]},
    {"first_batch": "soon"},
    {"disk": {"cold": 1}},
    {"stats": stats(course=[{"began": 0}])},
    {"stats": stats(course=[*course(3)[:1], {"began": -1}])},
]
NO_TRACES: list[Any] = [1, {}, {"traceEvents": [{"ph": "X"}]}, {"traceEvents": 3}]


@pytest.mark.parametrize(
    ("values", "trace"), [(bench(**c), None) for c in CHANGES] + [(stats(), t) for t in NO_TRACES]
)
def test_values_of_another_form_and_files_of_no_trace_are_a_data_error(values: Any, trace: Any) -> None:
    with pytest.raises(DataError):
        run_page(values, trace=trace)


@pytest.mark.torture
def test_the_commands_write_the_page_of_a_run(
    lmdb_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Loader(lmdb_shards, batch_size=4, transform=EvalTransform(32), workers=1) as loader,
        tracing(loader) as trace,
    ):
        for _ in loader:
            pass
    (tmp_path / "stats.json").write_text(json.dumps(loader.stats().to_dict()))
    trace.save(tmp_path / "trace.json")
    full_profile().save(tmp_path / "disk.json")
    files = {"--trace": "trace.json", "--disk": "disk.json", "-o": "page.html"}
    words = [word for option, name in files.items() for word in (option, tmp_path / name)]

    done = prep_here("report", "--run", tmp_path / "stats.json", *words)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    words = ["--seconds", "0.1", "--workers", "0", "--batch-size", "4", "--size", "32", "--json"]
    monkeypatch.setitem(read_json_file.__kwdefaults__, "most", 1000)  # a trace may be larger than other files
    words += ["--trace", tmp_path / "new.json", "--html", tmp_path / "bench.html"]
    benched = prep_here("bench-loader", lmdb_shards, *words)

    assert done.returncode == benched.returncode == 0, done.stderr + benched.stderr
    assert all(word in page for word in ("Timeline", "worker 0", "Disk", "random, 16 at once", "Stages"))
    assert str(lmdb_shards) in (tmp_path / "bench.html").read_text(encoding="utf-8")
    assert json.loads(benched.stdout)["stats"]["course"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "--run STATS.json"),
        (["--run", "stats.json", "."], 2, "--run STATS.json"),
        ([".", "--trace", "t.json"], 2, "--run STATS.json"),
        (["--run", "stats.json", "--seed", "0"], 2, "--seed: for a DATASET, not for a run"),
        (["--run", "stats.json"], 1, "prep: stats.json: these are not the stats of"),
    ],
)
def test_a_report_is_of_a_dataset_or_of_a_run_and_names_a_damaged_file(
    words: list[str], code: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "stats.json").write_text("[]")

    done = prep_here("report", *words, "-o", "page.html", cwd=tmp_path)

    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["stats.json"]


def test_a_loaders_chart_marks_the_stage_that_limits_by_a_word() -> None:
    with FakeData(20, batch_size=10, size=(8, 8), seconds=0.0005) as data:
        for _ in data:
            pass
        page = data.stats()._repr_html_()
        assert RunValues.of(json.loads(json.dumps(data.stats().to_dict()))).stages

    (limit,) = re.findall(r"<tr><th (?:(?!</tr>).)*<b>limits</b>(?:(?!</tr>).)*</tr>", page)
    assert (">fake<" in limit, "fake limits, at" in page) == (True, True)
    assert "<td>2 on 1 CPU</td>" in run_page(stats(workers=2, cpus=1))
    assert "<script" not in page
