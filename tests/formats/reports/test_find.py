"""Pictures are found in a dataset by their bytes, by what they were made of, and by how they look."""

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cv2
import numpy as np
import pytest

from shardprep.cli.commands.report import SHOWN_SIGHTINGS
from shardprep.formats import DataError, SourceDamaged, UsageError, collect, find, open_dataset
from shardprep.formats.reports.pixels import CODES
from shardprep.loaders import Loader, LocalShuffle, Receipt, TrainTransform
from shardprep.loaders.loader.run_log import LogEntry, RunLog
from shardprep.loaders.order.epoch import EpochPlan
from support.datasets import converted, prep_here
from support.examined import picture, weaker
from support.image_files import encoded


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """24 different pictures, the first twice."""
    folder = tmp_path_factory.mktemp("pictures")
    made = []
    for number in range(24):
        made.append(folder / ("ant", "bee")[number % 2] / f"p{number:02}.jpg")
        made[-1].parent.mkdir(exist_ok=True)
        made[-1].write_bytes(encoded(picture(number), ".jpg", cv2.IMWRITE_JPEG_QUALITY, 90))
    made.append(folder / "bee" / "twin.jpg")
    made[-1].write_bytes(made[0].read_bytes())
    return made


@pytest.fixture(scope="module")
def datasets(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source, folder = files[0].parent.parent, tmp_path_factory.mktemp("converted")
    options: dict[str, dict[str, Any]] = {"plain": {}, "hdf5": {"container": "hdf5"}}
    options |= {"crop-ready": {"crop_ready": True}, "shrunk": {"crop_ready": True, "shorter_side": 150}}
    for name, given in options.items():
        converted(source, folder / name, shard_size=60_000, **given)
    return {name: folder / name for name in options}


def key_of(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


@pytest.mark.parametrize("kind", ["plain", "hdf5", "crop-ready", "shrunk"])
def test_a_picture_is_found_by_its_bytes_in_any_form_that_they_are_stored_in(
    kind: str, files: list[Path], datasets: dict[str, Path]
) -> None:
    found = find(datasets[kind], [files[3], files[0]], workers=1)

    assert [one.key for one in found if one.image == str(files[3])] == [key_of(files[3])]
    assert {one.key for one in found if one.image == str(files[0])} == {key_of(files[0]), key_of(files[-1])}
    assert {one.distance for one in found} == {None}
    with open_dataset(datasets[kind]) as ds:
        assert all((one.key, one.label) == (ds[one.record].key, ds[one.record].label) for one in found)
        assert {one.class_name for one in found} == {ds.classes[one.label] for one in found}


@pytest.mark.parametrize("kind", ["plain", "crop-ready", "shrunk"])
def test_near_and_turned_pictures_alone_match(kind: str, datasets: dict[str, Path], tmp_path: Path) -> None:
    asked = []
    for number in (4, 5, 30):  # the last one is in no dataset
        asked.append(tmp_path / f"{number}.jpg")
        turned = np.rot90(picture(number)[:, :: (-1) ** number], number % 4)  # 5 is mirrored, too
        asked[-1].write_bytes(weaker(np.ascontiguousarray(turned), number))
    asked.append(tmp_path / "flat.png")  # is near to nothing
    asked[-1].write_bytes(encoded(np.full((50, 60, 3), 7, np.uint8), ".png"))

    assert find(datasets[kind], asked, workers=1) == []
    found = find(datasets[kind], asked, near=True, workers=1)

    four, five = map(str, asked[:2])
    assert {(one.image, one.key) for one in found} == {(four, "ant/p04.jpg"), (five, "bee/p05.jpg")}
    assert all(one.distance is not None and one.distance <= 4 for one in found)


@pytest.mark.parametrize("kind", ["plain", "crop-ready"])
def test_a_picture_from_a_dataset_of_another_form_is_found(
    kind: str, datasets: dict[str, Path], tmp_path: Path
) -> None:
    for other in ("crop-ready", "shrunk"):
        with open_dataset(datasets[other]) as ds:
            (tmp_path / "stored.jpg").write_bytes(ds[7].image)

            (found,) = find(datasets[kind], [tmp_path / "stored.jpg"], workers=1)

            assert (found.key, found.distance) == (ds[7].key, None)


def test_hashes_are_kept_and_belong_to_one_dataset(
    datasets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, kept = tmp_path / "near.jpg", tmp_path / "hashes"
    near.write_bytes(weaker(picture(4), 4))
    first = find(datasets["plain"], [near], near=True, hashes=kept, workers=1)
    monkeypatch.setattr("shardprep.formats.reports.pixels.ImageReading.statistics", None)

    assert find(datasets["plain"], [near], near=True, hashes=kept, workers=1) == first != []
    with pytest.raises(DataError, match="no hashes of this dataset"):
        find(datasets["shrunk"], [near], near=True, hashes=kept, workers=1)
    whole = kept.read_bytes()
    rows = np.frombuffer(whole.partition(b"\n")[2], CODES).copy()
    rows["record"] += 1 << 32
    for damaged in (whole[:-1], whole[: -rows.nbytes] + rows.tobytes()):
        kept.write_bytes(damaged)
        with pytest.raises(DataError, match="no hashes of this dataset"):
            find(datasets["plain"], [near], near=True, hashes=kept, workers=1)


def test_what_is_no_picture_is_wrong_usage(datasets: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("not a picture")
    (tmp_path / "empty.jpg").write_bytes(b"")
    os.mkfifo(tmp_path / "fifo.jpg")

    reasons = {"text.jpg": "not a valid", "empty.jpg": "0 bytes", "": "is a folder", "no.jpg": "No such"}
    kinds = {"no.jpg": FileNotFoundError, "fifo.jpg": SourceDamaged}
    for file, reason in (reasons | {"fifo.jpg": "not a regular file"}).items():
        with pytest.raises(kinds.get(file, UsageError), match=reason):
            find(datasets["plain"], [tmp_path / file], workers=1)
    with pytest.raises(UsageError, match="at least one picture"):
        find(datasets["plain"], [])
    with pytest.raises(UsageError, match="near=True"):
        find(datasets["plain"], [tmp_path / "text.jpg"], hashes=tmp_path / "hashes")


@pytest.mark.parametrize("options", [{}, {"without": [1, 5, 9]}, {"without": [1, 5], "gaps": "keep"}])
def test_a_run_saw_a_record_when_its_ranks_got_it_and_a_huge_epoch_does_not_hang_the_search(
    options: Any, datasets: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"batch_size": 3, "shuffle": LocalShuffle(9), "seed": 4, "workers": 0} | options
    expected = set()
    for rank in range(2):
        with Loader(datasets["plain"], rank=rank, world_size=2, with_numbers=True, **run) as loader:
            for epoch in range(3):
                for step, (_, _, numbers) in enumerate(loader):
                    expected |= {(number, epoch, step, rank) for number in numbers.tolist()}
            order = loader.order_of()

    with patch.object(EpochPlan, "order", autospec=True, side_effect=EpochPlan.order) as computed:
        assert {one[:4] for one in RunLog(order.card).sightings(order, range(25), 3)} == expected
    assert computed.call_count == 3  # not for each rank
    assert {one[:4] for one in order.sightings([7], 2)} == {one for one in expected if one[:2] == (7, 2)}
    huge = LogEntry(order.card, Receipt(order.card.dataset, 1 << 62), 0, 0, 0, ())
    RunLog(order.card, [huge]).save(tmp_path / "huge.jsonl")
    monkeypatch.setattr("shardprep.cli.commands.report.find_images", None)  # nothing is read before
    done = prep_here("find", datasets["plain"], tmp_path, "--run", tmp_path / "huge.jsonl")
    assert (done.returncode, "say by --epochs" in done.stderr) == (1, True), done.stderr


def test_a_log_tells_at_which_steps_a_run_saw_records_even_if_its_ranks_and_batches_changed(
    files: list[Path], datasets: dict[str, Path], tmp_path: Path
) -> None:
    log, expected, state = tmp_path / "run.jsonl", set(), None
    # the rank, their number, batch size, steps, and the place from which steps are counted
    for rank, world, size, steps, start in [
        *((0, 1, 5, 9, 0), (0, 1, 5, 2, 0), (0, 1, 5, 1, 0)),  # an epoch, and three steps with a stop
        *((0, 2, 4, 9, 15), (1, 2, 4, 9, 15), (0, 1, 3, 1, 0), (0, 1, 1, 4, 0)),
    ]:
        run = {"batch_size": size, "rank": rank, "world_size": world, "transform": TrainTransform(8)}
        with Loader(datasets["plain"], **run, seed=2, workers=0, with_numbers=True) as loader:
            if state is not None:
                loader.load_state_dict(state)
            epoch, first = loader.epoch, {(5, 1): 2, (1, 4): 3}.get((size, steps), 0)
            for step, (_, _, numbers) in enumerate(islice(loader, steps), first):
                expected |= {(number, epoch, step, rank, start) for number in numbers.tolist()}
            loader.log_epoch(log)
            state = loader.state_dict() if rank == world - 1 else state

    words = ["find", datasets["plain"], *files[1:], "--workers", 1, "--run", log]
    told = json.loads(prep_here(*words, "--json").stdout)["found"]

    assert {(one["record"], *at.values()) for one in told for at in one["seen"]} == expected
    for number, epoch, step, rank, start in sorted(expected)[::20]:
        place = ["--epoch", epoch, "--step", step, "--rank", rank, "--start", start]
        shown = json.loads(prep_here("replay", datasets["plain"], "--state", log, *place, "--json").stdout)
        assert number in {record["number"] for record in shown["records"]}
    order, lines = loader.order_of(), log.read_text().splitlines(keepends=True)
    for line, epoch, untold in ((3, 1, 15), (6, 2, 3)):  # from which only the batch size changed
        log.write_text(lines[line])
        found = RunLog.load(log).sightings(order, range(25), 3)
        assert sum(1 for one in found if one.epoch == epoch and one.step is None) == untold
        assert f"epoch {epoch}, at a step before those in the log" in prep_here(*words).stdout


def test_a_command_says_where_and_when(files: list[Path], datasets: dict[str, Path], tmp_path: Path) -> None:
    with Loader(datasets["plain"], batch_size=5, transform=TrainTransform(8), workers=0, seed=2) as loader:
        loader.card().save(tmp_path / "card.json")
    unknown = tmp_path / "unknown.png"
    unknown.write_bytes(encoded(picture(40), ".png"))
    words = ["find", datasets["plain"], files[3], unknown, "--run", tmp_path / "card.json", "--epochs", 2]

    said = prep_here(*words)
    told = json.loads(prep_here(*words, "--json").stdout)

    assert f"{unknown}: not found" in said.stdout
    assert f"{key_of(files[3])} (the same image)" in said.stdout
    (found,) = told["found"]
    assert [one["epoch"] for one in found["seen"]] == [0, 1]
    assert all(f"epoch {s['epoch']}, step {s['step']}, rank 0" in said.stdout for s in found["seen"])
    assert told["not_found"] == [str(unknown)]
    without_run = prep_here(*words[:4]).stdout
    assert (f"{key_of(files[3])} (the same image)" in without_run, "epoch" in without_run) == (True, False)
    assert "and 3 more: --json lists them" in prep_here(*words[:-1], SHOWN_SIGHTINGS + 3).stdout
    collect(tmp_path / "all", [datasets["plain"], datasets["hdf5"]])
    with Loader(tmp_path / "all", batch_size=5, workers=0) as loader:
        loader.card().save(tmp_path / "card.json")
    for part in json.loads(prep_here("find", tmp_path / "all", *words[2:], "--json").stdout)["parts"]:
        (found,) = part["found"]
        step = (found["record"] + 25 * part["dataset"].endswith("hdf5")) // 5
        assert [(seen["epoch"], seen["step"]) for seen in found["seen"]] == [(0, step), (1, step)]


def test_wrong_usage_is_refused_before_any_image_is_read(
    files: list[Path], datasets: dict[str, Path], tmp_path: Path
) -> None:
    with Loader(datasets["plain"], batch_size=5, workers=0) as loader:
        loader.card().save(tmp_path / "card.json")
    kept = ["--hashes", tmp_path / "h"]
    other = prep_here("find", datasets["shrunk"], files[0], "--near", *kept, "--run", tmp_path / "card.json")
    assert "the run used the dataset with the root" in other.stderr
    assert not (tmp_path / "h").exists()
    for words in (kept, ["--epochs", 2]):
        assert prep_here("find", datasets["plain"], files[0], *words).returncode == 2
    done = prep_here("find", datasets["plain"].parent, "none.jpg", cwd=tmp_path)  # one error for all splits
    assert (done.returncode, done.stderr) == (3, "prep: none.jpg: No such file or directory\n")
