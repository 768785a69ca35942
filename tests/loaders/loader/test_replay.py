"""A step that is made again, its sheet, the card of its run, and where two runs part."""

import base64
import json
import re
from collections.abc import Iterator
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardprep.formats import open_dataset
from shardprep.formats.errors import BadImage, DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.loaders import (
    ColorJitter,
    ContactSheet,
    EvalTransform,
    GlobalShuffle,
    Loader,
    LocalShuffle,
    Replayed,
    ReplayedRecord,
    RunCard,
    TrainTransform,
)
from shardprep.loaders.loader.replay import GAP, TITLE, first_parting, pictures_of
from shardprep.loaders.loader.run_log import RunLog
from shardprep.loaders.transforms.decode import decode_rgb
from support.column_datasets import write_columns
from support.cut_datasets import collected
from support.loaded import assert_same, crops_on, epoch_of, loader_on
from support.loader_workers import Tagging, reject
from support.sampling import torture_except


def undeclared(record: Any, rng: np.random.Generator) -> Any:
    """A transform that declares no outputs, and draws numbers."""
    return decode_rgb(record)[:4, :4] if rng.random() < 2 else None, rng.random(3)


def named(record: Any, rng: np.random.Generator) -> dict[str, Any]:
    objects = np.array([record.image[:5], None, str(rng.random())], np.object_)
    return {"some": [record.image[:5], rng.random(3)], "size": (0, len(record.image), {}), "objects": objects}


@pytest.mark.parametrize(
    "options",
    [
        {"transform": named},
        {"columns": iter(["image", "caption"])},
        *torture_except([{"transform": undeclared}, {}]),
    ],
    ids=["named", "columns", "undeclared", "all"],
)
def test_columns_and_results_of_any_form_are_replayed(options: Any, tmp_path: Path) -> None:
    write_columns(tmp_path / "columns")
    with Loader(
        tmp_path / "columns", batch_size=2, workers=0, drop_last=False, **{"seed": 3, **options}
    ) as run:
        delivered = list(run)
        replays = [run.replay(0, step).batch for step in range(len(delivered))]

        first = run.replay(0, 0)
        assert run.card().columns == (("image", "caption") if "columns" in options else None)
    closed = run.replay(0, 0)

    assert list(map(repr, replays)) == list(map(repr, delivered))
    assert first.first_difference(closed) is None
    assert len(set(first.digests())) == len(first) == 2


@pytest.mark.parametrize("shuffle", [None, LocalShuffle(60)])
def test_bad_records_are_told_with_their_reasons(shuffle: Any, lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        bad = {dataset.index["key"][number].decode(): reject for number in (3, *range(50, 60))}
    options = {"transform": Tagging(bad), "shuffle": shuffle}
    with loader_on(lmdb_shards, **options, on_bad_record="skip") as loader:
        delivered = epoch_of(loader)
        replays = [loader.replay(0, step) for step in range(len(delivered))]
        told = {record.key: record.skipped for each in replays for record in each.skipped}
        assert told == loader.skipped == dict.fromkeys(bad, "does not decode")
        assert not any(record.shown for each in replays for record in each)
    with loader_on(lmdb_shards, **options) as loader, pytest.raises(BadImage):
        loader.replay(0, next(each.step for each in replays if each.skipped))

    assert_same([each.batch for each in replays], delivered)
    assert all(len(each.digests()) == len(each) for each in replays)


def test_a_record_that_repeats_in_a_step_shows_a_part_of_its_own_each_time(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    weights = {"part-0": 9.0, "part-1": 1.0}
    with crops_on(collected(lmdb_shards, tmp_path, 2), weights=weights, batch_size=204, workers=0) as loader:
        rows = loader.replay(0, 0).records

    assert len({row.number for row in rows}) < len({row.shown for row in rows}) == len(rows)


OPTIONS: dict[str, list[Any]] = {
    "shuffle": [LocalShuffle(60), None, LocalShuffle(204), GlobalShuffle(), LocalShuffle(60, partitions=2)],
    "seed": [0, 1],
    "batch_size": [6, 8],
    "world_size": [1, 2],
    "drop_last": [True, False],
    "labels": ["sorted_wnid0", "ilsvrc2012_id", "sorted_wnid1_bg"],
    "records": [None, np.arange(204) % 5 > 0],
    "transform": [TrainTransform(8), EvalTransform(8, resize=9), EvalTransform(8, resize=10), None],
    "with_numbers": [True, False],
}


def delivered(path: Path, run: dict[str, Any], epoch: int) -> Iterator[list[tuple[int, int]]]:
    """The record and the label of each row that an iteration without a transform delivers."""
    with loader_on(path, **(run | {"transform": None, "with_numbers": True, "rank": 0})) as loader:
        loader.set_epoch(epoch)
        for _, labels, numbers in loader:
            yield list(zip(numbers.tolist(), labels.tolist(), strict=True))


def brute_force(path: Path, one: dict[str, Any], other: dict[str, Any]) -> tuple[Any, ...] | None:
    """The first row that differs, of two epochs that were delivered, and what does."""
    for epoch in range(2):
        steps = zip_longest(delivered(path, one, epoch), delivered(path, other, epoch), fillvalue=[])
        for step, both in enumerate(steps):
            for row, (some, others) in enumerate(zip_longest(*both, fillvalue=(None, None))):
                if some[0] != others[0]:
                    return epoch, step, row, "order", (some[0], others[0])
                if some[1] != others[1]:
                    return epoch, step, row, "labels", (some[0], others[0])
                if one["with_numbers"] != other["with_numbers"]:
                    return epoch, step, row, "columns", (some[0], others[0])
                transforms = one["transform"], other["transform"]
                draws = any(isinstance(each, TrainTransform) for each in transforms)
                if transforms[0] != transforms[1] or (draws and one["seed"] != other["seed"]):
                    return epoch, step, row, "augmentation", (some[0], others[0])
    return None


@pytest.mark.torture
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_runs_part_where_their_deliveries_do(data: st.DataObject, lmdb_shards: Path) -> None:
    one = {name: data.draw(st.sampled_from(values)) for name, values in OPTIONS.items()}
    changed = data.draw(st.sets(st.sampled_from(sorted(OPTIONS)), max_size=2))
    other = one | {name: data.draw(st.sampled_from(OPTIONS[name])) for name in changed}
    with loader_on(lmdb_shards, rank=0, **one) as some, loader_on(lmdb_shards, rank=0, **other) as others:
        found = some.parting(others, range(2))

    place = found and (found.epoch, found.step, found.row, found.kind, found.numbers)
    assert place == brute_force(lmdb_shards, one, other)
    assert found is None or set(found.because) <= changed
    assert found is None or found.because


def test_runs_on_other_datasets_part_at_the_first_step(lmdb_shards: Path, splits: Path) -> None:
    with loader_on(lmdb_shards) as one, loader_on(splits / "train") as other:
        parting = one.parting(other)
    assert parting
    assert (parting.kind, *parting.because) == ("dataset", "dataset")


def test_each_step_that_is_compared_is_counted(lmdb_shards: Path) -> None:
    steps: list[None] = []
    with loader_on(lmdb_shards, shuffle=None, transform=None) as one:
        other = one.order_of(one.card())
        same = first_parting(
            other, other, range(3), pixels=lambda *_: None, step_done=lambda: steps.append(None)
        )

    assert (same, len(steps)) == (None, 63)


def read_png(data: bytes) -> np.ndarray[Any, Any]:
    return cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_pictures_are_the_pixels_before_normalisation(dtype: Any, layout: Any, lmdb_shards: Path) -> None:
    form = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.1)}
    plain, normalised = TrainTransform((20, 16)), TrainTransform((20, 16), dtype=dtype, layout=layout, **form)
    with (
        loader_on(lmdb_shards, transform=plain) as one,
        loader_on(lmdb_shards, transform=normalised) as other,
    ):
        expected = one.replay(0, 1).batch[0]
        found = pictures_of(other.replay(0, 1).batch, normalised)

    assert np.abs(np.stack(found).astype(int) - expected).max() <= {"bfloat16": 2, "float16": 1}.get(dtype, 0)


def test_numbers_of_other_transforms_are_stretched() -> None:
    first, second = pictures_of((np.linspace(-3, 5, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4),), None)

    assert (first.shape, first.min(), second.max()) == ((4, 4, 3), 0, 255)
    assert pictures_of((np.full((1, 2, 2), 0.5),), None)[0].tolist() == [[[128] * 3] * 2] * 2


@pytest.mark.parametrize("batch", [({"caption": ["a"]},), (np.zeros((2, 3)),), ([{"a": 1}],)], ids=str)
def test_a_batch_without_images_has_no_sheet(batch: Any) -> None:
    with pytest.raises(UsageError, match="image"):
        pictures_of(batch, None)


def step(names: list[str], pixels: Any, reasons: dict[str, str]) -> Replayed:
    records = (ReplayedRecord(at, name, at, skipped=reasons.get(name)) for at, name in enumerate(names))
    return Replayed(0, 7, (pixels, np.arange(len(pixels))), tuple(records))


def test_a_sheet_has_each_picture_in_its_cell(tmp_path: Path) -> None:
    names = ["a" * 300, "\u202eé\x1b[2J<b>", "bad", *map(str, range(6))]
    pixels = np.random.default_rng(0).integers(0, 255, (8, 160, 160, 3), np.uint8)
    sheet = ContactSheet(step(names, pixels, {"bad": "<i>broken"}))
    sheet.save(tmp_path / "sheet.PNG")
    drawn = read_png((tmp_path / "sheet.PNG").read_bytes())

    assert np.array_equal(drawn, sheet.drawn())
    assert drawn.shape[1] == GAP + 4 * (160 + GAP)
    height = (len(drawn) - TITLE - GAP) // 3
    for place, row in enumerate([0, 1, None, *range(2, 8)]):
        x, y = GAP + place % 4 * (160 + GAP), TITLE + GAP + place // 4 * height
        assert np.array_equal(drawn[y : y + 160, x : x + 160], pixels[row]) == (row is not None)


def test_a_page_has_the_pixels_as_they_are_and_no_foreign_markup(tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="pages need Jinja2")
    pixels = np.random.default_rng(0).integers(0, 255, (2, 9, 8, 3), np.uint8)
    made = step(["\u202e<script>x</script>", "bad", "c"], pixels, {"bad": "<i>broken"})
    ContactSheet(made).save(tmp_path / "sheet.html")
    text = (tmp_path / "sheet.html").read_text()

    found = [read_png(base64.b64decode(data)) for data in re.findall(r"png;base64,([^\"]+)", text)]
    assert [picture.tolist() for picture in found] == pixels.tolist()
    assert "<script" not in text
    assert "<i>" not in text
    assert "\u202e" not in text
    assert "default-src" in text
    assert made.digest() in text


def test_a_sheet_of_another_kind_or_of_too_many_is_refused(tmp_path: Path, lmdb_shards: Path) -> None:
    one = step(["a"], np.zeros((1, 4, 4, 3), np.uint8), {})
    many = step(list(map(str, range(1025))), np.zeros((1025, 1, 1, 3), np.uint8), {})
    with pytest.raises(UsageError, match=r"\.png or \.html"):
        ContactSheet(one).save(tmp_path / "sheet.gif")
    with pytest.raises(UsageError, match="at most 1024"):
        ContactSheet(many).png()
    with loader_on(lmdb_shards, transform=Tagging()) as loader, pytest.raises(UsageError, match="RGB"):
        ContactSheet(loader.replay(0, 0)).drawn()
    with loader_on(lmdb_shards, transform=EvalTransform(8, resize=9), batch_size=200) as loader:
        assert ContactSheet(loader.replay(0, 0), loader.transform).drawn().shape[1] <= 2400 + GAP


HALF = np.float32(0.5)
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"transform": None, "shuffle": None},
    "train": {
        "transform": TrainTransform([9, 8], scale=[HALF, 1], color_jitter=ColorJitter(HALF), lighting=0.1),
        "shuffle": LocalShuffle(60, partitions=2),
        "seed": 5,
        "rank": 1,
        "world_size": 2,
    },
    "without": {"transform": TrainTransform(9), "without": [4, 8, 100], "gaps": "keep", "seed": 5},
    "eval": {"transform": EvalTransform(8, resize=np.int64(9), dtype="float16"), "shuffle": GlobalShuffle()},
    "subset": {"transform": None, "records": range(5, 99), "drop_last": np.True_, "with_numbers": np.False_},
    "window in bytes": {"transform": None, "shuffle": LocalShuffle("500KB"), "labels": "ilsvrc2012_id"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_loader_of_a_card_has_the_batches_of_the_run(name: str, lmdb_shards: Path, tmp_path: Path) -> None:
    with loader_on(lmdb_shards, **RUNS[name]) as loader:
        expected = epoch_of(loader, 3)
        card, identity = loader.card(), loader.identity
        card.save(tmp_path / "card.json")
    read = RunCard.load(tmp_path / "card.json")
    with Loader(lmdb_shards, workers=0, **read.options()) as again:
        assert_same(epoch_of(again, 3), expected)
        assert (again.card(), again.identity) == (card, identity)

    assert read == card
    assert ("without" in card.to_json()) == (name == "without")
    assert (tmp_path / "card.json").read_bytes() == canonical_json(card.to_json())


def test_many_chosen_records_are_known_by_their_digest(lmdb_shards: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("shardprep.loaders.loader.run_card.MAX_LISTED", 10)
    with loader_on(lmdb_shards, transform=None, records=np.arange(30)) as loader:
        card = loader.card()
    with pytest.raises(UsageError, match="30 records"):
        card.options()
    assert RunCard.from_json(card.to_json()) == card


@pytest.fixture(scope="module")
def good(lmdb_shards: Path) -> bytes:
    """The bytes of a card."""
    with loader_on(lmdb_shards, **RUNS["without"], records=range(0, 204, 2)) as loader:
        return canonical_json(loader.card().to_json())


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_changed_card_is_refused_or_is_another_card(
    data: st.DataObject, good: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    at = data.draw(st.integers(0, len(good) - 1))
    inserted = data.draw(
        st.binary(max_size=3) | st.sampled_from([b"null", b"-1", b"1e999", b"[[", b"{}", b'"'])
    )
    changed = good[:at] + inserted + good[at + data.draw(st.integers(0, 4)) :]
    file = tmp_path_factory.getbasetemp() / "changed card.json"
    file.write_bytes(changed)
    try:
        found = canonical_json(RunCard.load(file).to_json())
    except (DataError, UnknownVersion) as error:
        found = str(error).encode()

    assert str(file).encode() in found or found == canonical_json(json.loads(changed))


OWN = {"name": "TrainTransform", "identity": None, "arguments": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"seed": "0"},
        {"seed": True},
        {"batch_size": -1},
        {"batch_size": 0},
        {"world_size": 0},
        {"more": 1},
        {"shuffle": {"kind": "local"}},
        {"shuffle": {"kind": "local", "window": 0}},
        {"transform": OWN | {"arguments": {"size": 1 << 40}}},
        {"transform": OWN | {"arguments": {"size": 9, "color_jitter": {}}}},
        {"transform": OWN | {"name": "os"}},
        {"transform": []},
        {"records": {"count": 1, "digest": "", "numbers": [1 << 70]}},
        {"columns": "image"},
        *({name: to} for name, to in (("gaps", None), ("gaps", "open"), ("without", None))),
        {"versions": {"opencv": 5}},
    ],
    ids=str,
)
def test_a_card_with_other_values_is_damaged(change: dict[str, Any], good: bytes) -> None:
    with pytest.raises(DataError):
        RunCard.from_json(json.loads(good) | change)


def test_a_card_of_a_release_whose_transform_had_fewer_arguments_is_read(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=EvalTransform(8, resize=9)) as loader:
        value = json.loads(canonical_json(loader.card().to_json()))
        del value["transform"]["arguments"]["rounding"]
        assert RunCard.from_json(value) == loader.card()
        value["transform"]["more"] = 1
        with pytest.raises(DataError):
            RunCard.from_json(value)


def test_damage_names_the_part_of_the_card_and_another_version_is_unknown(good: bytes) -> None:
    lists = accumulate(range(10_000), lambda inner, _: [inner])  # each in the next
    for wrong, shown in ((None, "null has the wrong type"), ([*lists][-1], r"\[{9}")):
        with pytest.raises(DataError, match=f"its drop_last: {shown}"):
            RunCard.from_json(json.loads(good) | {"drop_last": wrong})
    with pytest.raises(UnknownVersion):
        RunCard.from_json(json.loads(good) | {"version": 2})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"epoch":0,"place":0,"receipt":{}}', "[" * 100_000])
def test_what_is_no_state_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "state").write_text(text)
    with pytest.raises(DataError, match="state"):
        RunLog.load(tmp_path / "state")
