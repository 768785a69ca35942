"""A fraction of train as val: disjoint, complete, stratified, and the same every time."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats import PlanMismatch, PlanOptions, SourceOptions, UsageError, convert, repair
from shardprep.formats.sources.converted import drawn
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import entry_dtype
from support.image_files import encoded, pixels
from support.source_builders import Miniature, contents, write

sizes_of_classes = st.lists(st.integers(1, 60), min_size=1, max_size=12)
fractions = st.floats(0.01, 0.99)
seeds = st.integers(0, (1 << 64) - 1)


def entries_of(sizes: list[int]) -> np.ndarray:
    rows = [(f"{c}/{i}".encode(), b"", c, 1, 0, 0) for c, size in enumerate(sizes) for i in range(size)]
    return np.array(rows, entry_dtype(8, 1))


@settings(deadline=None)
@given(sizes_of_classes, fractions, seeds)
def test_each_class_gives_its_fraction_and_keeps_an_image(
    sizes: list[int], fraction: float, seed: int
) -> None:
    entries = entries_of(sizes)

    is_val = drawn(entries, fraction, seed)

    counts = np.bincount(entries["label"][is_val], minlength=len(sizes))
    for size, count in zip(sizes, counts.tolist(), strict=True):
        assert count < size
        assert abs(count - size * fraction) <= 2
    assert abs(int(counts.sum()) - sum(sizes) * fraction) <= 1 + len(sizes)


@settings(deadline=None)
@given(sizes_of_classes, fractions, seeds, st.randoms(use_true_random=False))
def test_the_order_of_the_listing_does_not_matter(
    sizes: list[int], fraction: float, seed: int, random: object
) -> None:
    entries = entries_of(sizes)
    mixed = entries[np.random.default_rng(seed).permutation(len(entries))]

    assert {*entries["key"][drawn(entries, fraction, seed)]} == {*mixed["key"][drawn(mixed, fraction, seed)]}


def test_a_tenth_of_classes_of_ten_is_one_of_each_and_another_for_every_seed() -> None:
    entries = entries_of([10] * 5)
    found = [drawn(entries, 0.1, seed) for seed in range(20)]

    assert all(np.bincount(entries["label"][one]).tolist() == [1] * 5 for one in found)
    assert len({one.tobytes() for one in found}) == 20


def test_the_drawing_of_a_seed_never_changes() -> None:
    entries = entries_of([6, 6])

    assert entries["key"][drawn(entries, 0.25, 0)].tolist() == [b"0/3", b"1/4"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        for number in range(10):
            write(tmp_path / "photos" / name / f"{number}.png", encoded(pixels(8, 8 + number), ".png"))
    return tmp_path / "photos"


def test_train_and_val_are_disjoint_and_complete(photos: Path) -> None:
    whole = contents(recognise(photos).listing("train"))
    source = recognise(photos, options=SourceOptions(val_fraction=0.2), seed=3)

    train, val = (contents(source.listing(split)) for split in source.splits)

    assert source.splits == ("train", "val")
    assert len(val) == 4
    assert train | val == whole
    assert train.keys().isdisjoint(val)


def test_the_fraction_and_the_seed_are_recorded_and_repair_knows_them(photos: Path, tmp_path: Path) -> None:
    done = convert(
        photos,
        tmp_path / "out",
        plan_options=PlanOptions(seed=5),
        source_options=SourceOptions(val_fraction=0.2),
        workers=0,
    )

    assert [(one.path.name, one.manifest.records) for one in done] == [("train", 16), ("val", 4)]
    assert {one.manifest.source["val_fraction"] for one in done} == {0.2}
    assert {one.manifest.plan["seed"] for one in done} == {5}
    (tmp_path / "out/val/shard-00000.lmdb").unlink()
    assert repair(tmp_path / "out/val", photos, workers=0).findings == []


def test_another_fraction_than_a_finished_outputs_is_named_with_the_old_one(
    photos: Path, tmp_path: Path
) -> None:
    convert(photos, tmp_path / "out", source_options=SourceOptions(val_fraction=0.2), workers=0)

    with pytest.raises(PlanMismatch, match=r"dataset: --val-fraction was 0\.2, is now 0\.4; choose"):
        convert(photos, tmp_path / "out", source_options=SourceOptions(val_fraction=0.4), workers=0)


def test_one_of_the_two_splits_can_be_converted_alone(photos: Path, tmp_path: Path) -> None:
    options = SourceOptions(val_fraction=0.2)
    both = convert(photos, tmp_path / "both", source_options=options, workers=0)

    (alone,) = convert(photos, tmp_path / "val", split="val", source_options=options, workers=0)

    assert alone.manifest.root == both[1].manifest.root


def test_a_list_is_divided_too(photos: Path, tmp_path: Path) -> None:
    write(tmp_path / "val.txt", "".join(f"cat/{n}.png {n % 2}\n" for n in range(10)).encode())
    options = SourceOptions(root=photos, val_fraction=0.2)

    source = recognise(tmp_path / "val.txt", options=options)

    assert [len(source.listing(split).entries) for split in source.splits] == [8, 2]


def test_a_source_with_a_val_of_its_own_is_refused(tmp_path: Path) -> None:
    Miniature().write_tree(tmp_path)

    with pytest.raises(UsageError, match="this one has train, val, test; leave out --val-fraction"):
        recognise(tmp_path, options=SourceOptions(val_fraction=0.1))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_a_fraction_that_is_none_is_wrong_usage(fraction: float) -> None:
    with pytest.raises(UsageError, match="above 0 and below 1"):
        SourceOptions(val_fraction=fraction)
