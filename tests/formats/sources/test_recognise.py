import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import LabelConflict, UsageError
from shardprep.formats.sources.recognise import recognise
from support.source_builders import DEVKIT, TEST, TRAIN, Miniature, contents

LAYOUTS: dict[str, Callable[[Miniature, Path], Path]] = {
    "tars": Miniature.write_tars,
    "tree": Miniature.write_tree,
    "tree with val in folders": lambda mini, folder: mini.write_tree(folder, foldered_val=True),
    "kaggle": Miniature.write_kaggle,
}

numbers = st.lists(st.integers(0, 99_999), min_size=1, max_size=3, unique=True).map(tuple)
miniatures = st.builds(
    lambda order, images, truth: Miniature(order, dict(zip(order, images, strict=True)), truth),
    order=st.permutations(["n01440764", "n02100735", "n02119789"]).map(tuple),
    images=st.lists(numbers, min_size=3, max_size=3),
    truth=st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple),
)


@given(mini=miniatures)
@settings(max_examples=20, deadline=None)
def test_every_layout_gives_the_same_keys_labels_and_bytes(
    mini: Miniature, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name, lay_out in LAYOUTS.items():
        folder = lay_out(mini, tmp_path_factory.mktemp("source"))
        mini.write_devkit(folder)
        source = recognise(folder)
        assert {split: contents(source.listing(split)) for split in source.splits} == mini.records, name
        assert {source.listing(split).labels.digest for split in source.splits} == {
            recognise(folder).listing("train").labels.digest
        }


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Train is extracted; val and test are still in their archives, too."""
    Miniature().write_tree(Miniature().write_tars(tmp_path))
    (tmp_path / TRAIN).unlink()
    return tmp_path


def test_each_split_is_taken_from_the_layout_that_has_it_and_from_tars_where_both_do(mixed: Path) -> None:
    source = recognise(mixed)
    assert source.description == (
        "train of extracted-tree, val of official-tars, test of official-tars (3 classes)"
    )
    assert {split: contents(source.listing(split)) for split in source.splits} == Miniature().records
    assert [source.listing(split).layout for split in source.splits] == [
        "extracted-tree",
        "official-tars",
        "official-tars",
    ]
    assert mixed.resolve() / "train" in source.folders
    assert source.boxes("val") is None


def test_splits_of_two_layouts_that_differ_in_their_classes_are_a_conflict(mixed: Path) -> None:
    (mixed / DEVKIT).unlink()
    with pytest.raises(
        LabelConflict, match=r"train \(extracted-tree\) has 3 classes, but val \(official-tars\)"
    ):
        recognise(mixed, split="train").listing("train")


def test_a_split_that_no_layout_has_is_wrong_usage(mixed: Path) -> None:
    (mixed / TEST).unlink()
    shutil.rmtree(mixed / "test")
    with pytest.raises(UsageError, match="no split 'test'; it has train, val"):
        recognise(mixed).listing("test")


def test_an_unknown_split_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not 'dev'"):
        recognise(tmp_path, split="dev")
