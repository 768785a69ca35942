"""A folder of splits, and what it is not."""

from pathlib import Path

import pytest

from shardprep.formats import ManifestDamaged, UsageError, convert, open_dataset
from shardprep.formats.shards.dataset import splits_of
from shardprep.loaders import Loader


@pytest.fixture(scope="module")
def shards(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All splits of the miniature, as ``prep convert`` leaves them."""
    output = tmp_path_factory.mktemp("splits") / "shards"
    convert(archives, output, workers=0)
    return output


def test_the_splits_of_a_conversion_are_found_in_their_usual_order(shards: Path) -> None:
    assert splits_of(shards) == {name: shards / name for name in ("train", "val", "test")}


def test_other_names_come_after_the_usual_ones(tmp_path: Path) -> None:
    for name in ("b", "val", "a", "train"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()

    assert list(splits_of(tmp_path)) == ["train", "val", "a", "b"]


@pytest.mark.parametrize("mark", ["manifest.json", "index.npy", ".prep"])
def test_a_split_that_is_unfinished_or_lost_its_manifest_is_not_passed_over(
    tmp_path: Path, mark: str
) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / mark).touch()

    assert list(splits_of(tmp_path)) == ["val"]


def test_a_dataset_an_empty_folder_a_file_and_nothing_have_no_splits(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()

    for path in (shards / "train", tmp_path, tmp_path / "photos", Path(__file__), tmp_path / "none"):
        assert splits_of(path) == {}


@pytest.mark.parametrize("opened", [open_dataset, Loader])
def test_opening_a_folder_of_splits_names_them(shards: Path, opened: type[Loader]) -> None:
    with pytest.raises(UsageError, match=r"folder of splits.*train, val and test.*shards/train") as raised:
        opened(shards)

    assert raised.value.path == str(shards)


@pytest.mark.parametrize("opened", [open_dataset, Loader])
def test_opening_a_folder_of_one_split_names_it(tmp_path: Path, opened: type[Loader]) -> None:
    (tmp_path / "val").mkdir()
    (tmp_path / "val" / "manifest.json").touch()

    with pytest.raises(UsageError, match=rf"give one of them, such as '{tmp_path}/val'"):
        opened(tmp_path)


def test_a_folder_without_splits_is_still_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(ManifestDamaged, match=r"no manifest\.json"):
        open_dataset(tmp_path)
