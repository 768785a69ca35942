"""The command ``prep replay``."""

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from shardprep.formats.runtime.json_record import canonical_json
from shardprep.loaders import Loader, LocalShuffle, TrainTransform, Views
from support.datasets import prep_here


@pytest.fixture(scope="module")
def folder(lmdb_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a split, with cards and a state of runs on it."""
    folder = tmp_path_factory.mktemp("replayed")
    (folder / "shards").mkdir()
    (folder / "shards/train").symlink_to(lmdb_shards)
    (folder / "mine.py").write_text(MINE)
    np.save(folder / "some.npy", np.arange(0, 40, 2))
    os.mkfifo(folder / "fifo")
    (folder / "cut.npz").write_bytes(b"PK\3\4")
    short = (folder / "some.npy").read_bytes().replace(b"(20,), }" + b" " * 12, b"(20%s,), }" % (b"0" * 12))
    (folder / "short.npy").write_bytes(short)
    (folder / "none.npy").write_bytes(short.replace(b"<i8", b"|S0"))
    for name, options in RUNS.items():
        with run(folder, **options) as loader:
            loader.card().save(folder / f"{name}.json")
            (folder / f"{name}-state.json").write_text(json.dumps(loader.state_dict()))
    with run(folder) as loader:
        loader.set_epoch(1)
        list(islice(loader, 3))
        (folder / "state.json").write_text(json.dumps(loader.state_dict()))
        loader.set_epoch(0)
        loader.skip([1])
        for _ in range(2):
            list(islice(loader, 3))
            loader.log_epoch(folder / "run.jsonl")
    (folder / "later.jsonl").write_text((folder / "run.jsonl").read_text().partition("\n")[0])
    with run(folder, batch_size=5) as loader:
        loader.set_epoch(1)
        next(iter(loader))
        loader.log_epoch(folder / "later.jsonl")
    return folder


MINE = """
import numpy as np
def seven(record, rng): return np.full((4, 4, 3), rng.integers(256), np.uint8)
def forms(record, rng): return {"bytes": len(record.image), "key": record.key}
"""


def seven(record: Any, rng: np.random.Generator) -> Any:
    """Another transform of that name."""
    return np.zeros(3)


RUNS: dict[str, dict[str, Any]] = {
    "run": {},
    "seed": {"seed": 3},
    "colours": {"transform": TrainTransform(16, lighting=0.1)},
    "other": {"transform": seven},
    "views": {"transform": Views([TrainTransform(16), TrainTransform(16)])},
    "subset": {"records": np.arange(0, 40, 2), "batch_size": 5},
}


def run(folder: Path, **options: Any) -> Loader:
    given = {"batch_size": 6, "transform": TrainTransform(16), "shuffle": LocalShuffle(30), "seed": 1}
    return Loader(folder / "shards/train", workers=0, **({"rank": 0, "world_size": 2} | given | options))


def replayed(folder: Path, *words: object) -> Any:
    done = prep_here("replay", "shards/train", *words, "--json", cwd=folder)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)


def records_of(loader: Loader, epoch: int, step: int) -> list[dict[str, Any]]:
    return [record.to_json() for record in loader.replay(epoch, step)]


def test_a_state_or_log_shows_its_last_step_or_another_without_the_skipped_ones(folder: Path) -> None:
    state, log = (replayed(folder, "--state", file) for file in ("state.json", "run.jsonl"))
    found = replayed(folder, "--state", "run.jsonl", "--epoch", 0, "--step", 1)
    other = replayed(folder, "--card", "run.json", "--step", 0, "--rank", 1)
    with run(folder) as loader, run(folder, rank=1) as second:
        assert state["records"] == log["records"] == records_of(loader, 1, 2)
        assert found["records"] == records_of(loader, 0, 2)
        assert other["records"] == records_of(second, 0, 0)
    assert (state["epoch"], state["step"], log["epoch"], log["step"]) == (1, 2, 1, 2)


def test_a_transform_is_given_by_its_import_path(folder: Path) -> None:
    found = replayed(folder, "--step", 0, "--batch-size", 2, "--transform", "mine:seven")

    assert found["batch"][0]["shape"] == [2, 4, 4, 3]
    assert found["card"]["transform"]["name"] == "seven"


def test_each_view_and_the_form_of_each_part_are_shown(folder: Path) -> None:
    views, forms = (
        prep_here("replay", "shards/train", "--step", 0, *words, cwd=folder).stdout
        for words in (("--card", "views.json"), ("--batch-size", 2, "--transform", "mine:forms"))
    )
    assert views.count("  view 1  ") == 6
    assert "bytes int64 [2], key a list of 2" in forms


def test_a_sheet_is_a_png_of_the_step_and_all_its_records_are_listed_on_request(
    folder: Path, tmp_path: Path
) -> None:
    words = ["--card", "subset.json", "--step", 1, "--sheet", tmp_path / "step.png"]
    done = prep_here("replay", "shards", *words, cwd=folder)

    assert done.returncode == 0
    assert cv2.imread(str(tmp_path / "step.png")).shape == (26 + 8 + 2 * 210, 8 + 4 * 168, 3)
    assert "step.png" in done.stdout
    assert "epoch 0, step 1, rank 0 of 2: 5 records" in done.stdout

    words = ["--step", 0, "--batch-size", 20]
    short, long = (
        prep_here("replay", "shards/train", *words, *more, cwd=folder).stdout for more in ([], ["--records"])
    )

    assert "and 10 more: --records lists them" in short
    assert len(long.splitlines()) == len(short.splitlines()) + 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--card", "run.json"], "give --step"),
        (["--state", "run-state.json"], "give --step: no step of this epoch was delivered"),
        (["--card", "run.json", "--step", 1000], "epoch 0: there is no step 1000; the epoch has "),
        (["--card", "run.json", "--step", 0, "--seed", 1], "--seed: the card or state sets it"),
        (["--card", "run.json", "--state", "state.json"], "give one of"),
        (["--card", "other.json", "--step", 0, "--transform", "mine:seven"], "its transform was seven"),
        (["--card", "run.json", "--step", 0, "--subset", "some.npy"], "its records was"),
        (["--step", 0, "--sheet", "x.gif"], ".png or .html"),
        *((["--step", 0, "--transform", name], "package.module:name") for name in ("neither", ".mine:seven")),
        (["--step", 0, "--transform", "mine:eight"], "has no attribute 'eight'"),
        (["--step", 0, "--gaps", "keep"], "--gaps is only for --without"),
        (["--diff", "run.json", "seed.json", "--step", 0], "--step: --diff compares"),
        (["--diff", "run.json", "seed.json", "--sheet", "x.png", "--records"], "--records, --sheet: --diff"),
        (["--step", 0, "--epochs", 2], "--epochs: it is only for --diff"),
        (["--step", 0, "--subset", "cut.npz"], "give an array, as numpy.save writes it; keys: np.array"),
        (["--step", 0, "--subset", "short.npy"], "than file size; give an array, as numpy.save"),
        *((["--step", 0, flag, "fifo"], "fifo: is not a regular file") for flag in ("--subset", "--without")),
        (["--step", 0, "--without", "none.npy"], "elements without a size; give an array, as numpy.save"),
        (["--card", "mine.py", "--step", 0], "line 1 is not JSON"),
    ],
    ids=lambda each: " ".join(map(str, each)) if isinstance(each, list) else "",
)
def test_what_cannot_be_replayed_is_said(folder: Path, words: list[object], message: str) -> None:
    done = prep_here("replay", "shards/train", *words, cwd=folder)

    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("option", ["--card", "--state"])
@pytest.mark.parametrize(
    "change", [{"color_jitter": 5}, {"lighting": "0.1"}, {"flip": "no"}, {"size": "16"}], ids=str
)
def test_a_wrong_option_of_the_transform_is_damage(
    folder: Path, tmp_path: Path, option: str, change: dict[str, Any]
) -> None:
    values = json.loads((folder / {"--card": "run.json", "--state": "state.json"}[option]).read_text())
    (values if option == "--card" else values["card"])["transform"]["arguments"] |= change
    (tmp_path / "changed.json").write_bytes(canonical_json(values))

    done = prep_here("replay", "shards/train", option, tmp_path / "changed.json", cwd=folder)

    assert done.returncode == 1
    (name,) = change
    assert f"its TrainTransform cannot be made: {name} must be" in done.stderr


def test_the_first_difference_of_two_runs_is_named(folder: Path) -> None:
    found = replayed(folder, "--diff", "run.json", "seed.json")
    said = prep_here("replay", "shards", "--diff", "run.json", "seed.json", cwd=folder).stdout.splitlines()
    same = replayed(folder, "--diff", "run.json", "state.json", "--epochs", 2)
    other = replayed(folder, "--diff", "run.json", "other.json")  # of which the transform is not there
    pixels = replayed(folder, "--diff", "run.json", "colours.json", "--pixels")
    later = replayed(folder, "--diff", "run.jsonl", "later.jsonl", "--epochs", 3)["parting"]

    assert (found["parting"]["kind"], found["parting"]["because"]) == ("order", {"seed": ["1", "3"]})
    assert (said[0].split(": ")[1], said[2].split()) == ("different records", ["seed", "1", "|", "3"])
    assert (same["parting"], same["settings"]) == (None, {})
    assert [one["parting"]["kind"] for one in (other, pixels)] == ["augmentation", "pixels"]
    assert (pixels["parting"]["step"], later["epoch"], *later["because"]) == (0, 1, "batch_size")
