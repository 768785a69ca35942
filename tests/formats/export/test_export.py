"""An export has the same bytes however it is made, and the same call finishes it after any interruption."""

import re
import shutil
from pathlib import Path

import pytest

from shardprep.formats import CorruptRecord, PlanMismatch, UsageError, convert, export  # fmt: skip
from shardprep.formats.exports.export import FORMATS, MARKER
from support.datasets import prep_here, tree, writable
from support.sampling import torture_except

SIZE = 60_000
every_format = pytest.mark.parametrize("to", FORMATS)


@pytest.fixture(scope="module")
def intact(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    convert(archives, folder, workers=0, split="train")
    return folder


@pytest.fixture(scope="module")
def whole(intact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The output of an unbroken export to each format."""
    folder = tmp_path_factory.mktemp("whole")
    for to in FORMATS:
        export(intact, folder / to, to=to, shard_size=SIZE, workers=0)
    return {to: folder / to for to in FORMATS}


@pytest.mark.slow
@pytest.mark.parametrize("to", torture_except(FORMATS, "webdataset"))
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    intact: Path, whole: dict[str, Path], to: str, tmp_path: Path
) -> None:
    export(intact, tmp_path, to=to, shard_size=SIZE, workers=3)

    assert tree(tmp_path) == tree(whole[to])
    assert len(tree(tmp_path)) > 5


@every_format
def test_a_finished_export_is_recognised_and_what_is_damaged_is_built_again(
    intact: Path, whole: dict[str, Path], to: str, tmp_path: Path
) -> None:
    shutil.copytree(whole[to], tmp_path / "out")
    (again,) = export(intact, tmp_path / "out", to=to, shard_size=SIZE, workers=0)
    files = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file() and p.name != MARKER]
    writable(files[0]).write_bytes(b"damaged")
    files[-1].unlink()

    (mended,) = export(intact, tmp_path / "out", to=to, shard_size=SIZE, workers=0)

    assert (again.already_complete, mended.already_complete) == (True, False)
    assert again.files == mended.files
    assert tree(tmp_path / "out") == tree(whole[to])


def test_a_folder_with_anything_else_is_refused_and_left_alone(
    intact: Path, whole: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("text")

    with pytest.raises(UsageError, match="not empty, and is not an export begun here"):
        export(intact, tmp_path, to="mds", workers=0)
    with pytest.raises(PlanMismatch, match="finished export: --to was folders, is now mds"):
        export(intact, whole["folders"], to="mds", shard_size=SIZE, workers=0)
    with pytest.raises(UsageError, match="lies in the source"):
        export(intact, intact / "tars", to="webdataset", workers=0)
    with pytest.raises(UsageError, match="not a folder"):
        export(intact, tmp_path / "mine", to="mds", workers=0)
    with pytest.raises(UsageError, match="known are webdataset, tfrecord, mds, parquet, croissant, folders"):
        export(intact, tmp_path / "out", to="zip", workers=0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("is_finished", [True, False])
def test_an_export_writes_through_no_link_in_its_output(
    intact: Path, whole: dict[str, Path], is_finished: bool, tmp_path: Path
) -> None:
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    if is_finished:
        shutil.copytree(whole["folders"], output)
    else:
        (output / ".prep").mkdir(parents=True)
    name = next(path.name for path in whole["folders"].iterdir() if path.is_dir())
    shutil.copytree(whole["folders"] / name, elsewhere)
    shutil.rmtree(output / name, ignore_errors=True)
    (output / name).symlink_to(elsewhere)
    before = {path.name: path.stat().st_ino for path in elsewhere.iterdir()}

    with pytest.raises(UsageError, match="a link or a file where a folder belongs"):
        export(intact, output, to="folders", shard_size=SIZE, workers=0)

    assert {path.name: path.stat().st_ino for path in elsewhere.iterdir()} == before


def test_a_damaged_record_ends_the_export_and_is_named(dataset: Path, tmp_path: Path) -> None:
    (shard,) = dataset.glob("*.lmdb")
    data = bytearray(shard.read_bytes())
    at = data.index(b"\xff\xd8\xff", len(data) // 2) + 200
    data[at] ^= 1
    writable(shard).write_bytes(data)

    with pytest.raises(CorruptRecord) as caught:
        export(dataset, tmp_path / "out", to="webdataset", workers=0)

    assert caught.value.key
    assert not (tmp_path / "out" / MARKER).exists()


def test_the_command_says_what_it_wrote(intact: Path, tmp_path: Path) -> None:
    words = ("export", intact, tmp_path / "out", "--to", "webdataset", "--workers", 0, "--quiet")

    first, second = prep_here(*words), prep_here(*words)
    machine = prep_here(*words, "--json")

    assert re.fullmatch(r"\S+out: 24 images, [\d.]+ KB in 1 file of webdataset\n", first.stdout)
    assert second.stdout == first.stdout.replace("\n", " (was complete, and is intact)\n")
    assert '"train-000000.tar"' in machine.stdout
