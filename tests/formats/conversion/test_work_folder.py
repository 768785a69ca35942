"""An unfinished conversion leaves and removes only its own files."""

import json
import shutil
from pathlib import Path

import pytest

from shardprep.formats import (
    ConvertOptions,
    CorruptRecord,
    DataError,
    PlanMismatch,
    PlanOptions,
    UsageError,
    convert,
    open_dataset,
    repair,
    verify,
)
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.shards.files import OUTPUT_FILES
from shardprep.formats.shards.read import MAX_OPEN
from support.datasets import converted, flip, prep, tree, writable
from support.repository import ROOT
from support.sampling import torture_except


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "thesis.txt").write_text("three years")
    return folder


def test_a_link_in_place_of_the_work_folder_is_refused_and_never_followed(
    archives: Path, tmp_path: Path, victim: Path
) -> None:
    dataset = tmp_path / "dataset"
    converted(archives, dataset)
    (dataset / ".prep").symlink_to(victim)

    assert [f.file for f in verify(dataset).findings] == [".prep"]
    with pytest.raises((DataError, UsageError)):
        converted(archives, dataset)
    sorted(dataset.glob("shard-*"))[0].unlink()
    with pytest.raises(UsageError):
        repair(dataset, archives, workers=0)
    assert (victim / "thesis.txt").read_text() == "three years"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    torture_except(
        ["counters", "lock", "plan.json", "index.npy", "shard-00000.lmdb.tmp"], "lock", "shard-00000.lmdb.tmp"
    ),
)
def test_links_inside_a_work_folder_are_never_written_through(
    archives: Path, tmp_path: Path, victim: Path, name: str
) -> None:
    work_folder = tmp_path / "out" / ".prep"
    work_folder.mkdir(parents=True)
    (work_folder / name).symlink_to(victim / "thesis.txt")

    prep("convert", archives, tmp_path / "out", "--split", "train", "--restart")

    assert (victim / "thesis.txt").read_text() == "three years"


class Killed(BaseException):
    """Raised to end the conversion."""


@pytest.fixture
def killed_before_the_manifest(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """End conversions when all but the manifest is published; undo the patch to let them finish."""
    from shardprep.formats.conversion import finish as finalize

    real = finalize.publish_bytes

    def publish_bytes(final: Path, data: bytes, work_folder: Path) -> None:
        if final.name == "manifest.json":
            raise Killed
        real(final, data, work_folder)

    monkeypatch.setattr(finalize, "publish_bytes", publish_bytes)
    return monkeypatch


@pytest.mark.parametrize("restart", [False, True])
def test_tables_of_an_earlier_attempt_do_not_stay(
    archives: Path, tmp_path: Path, killed_before_the_manifest: pytest.MonkeyPatch, restart: bool
) -> None:
    source = Path(shutil.copytree(archives, tmp_path / "source"))
    with pytest.raises(Killed):
        converted(source, tmp_path / "out")
    assert (tmp_path / "out" / "boxes.npy").exists()
    killed_before_the_manifest.undo()
    for archive in source.glob("*bbox*"):
        archive.unlink()
    options = ConvertOptions(restart=restart)
    plan_options = PlanOptions(shard_size=60_000)

    if restart:
        convert(
            source, tmp_path / "out", split="train", plan_options=plan_options, options=options, workers=0
        )
        assert verify(tmp_path / "out").findings == []
    else:
        with pytest.raises(PlanMismatch, match="boxes"):
            convert(source, tmp_path / "out", split="train", plan_options=plan_options, workers=0)


def test_restart_takes_away_all_that_was_published(
    archives: Path, tmp_path: Path, killed_before_the_manifest: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Killed):
        converted(archives, tmp_path / "out", on_bad_image="skip")

    with WorkFolder(tmp_path / "out") as work_folder:
        work_folder.discard(OUTPUT_FILES)

    assert [p.name for p in (tmp_path / "out").iterdir()] == [".prep"]


def test_an_unreadable_plan_says_what_to_do(archives: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".prep").mkdir(parents=True)
    (tmp_path / "out" / ".prep" / "plan.json").write_text("{")

    with pytest.raises(PlanMismatch, match="--restart"):
        converted(archives, tmp_path / "out")


def test_checking_md5_changes_nothing(archives: Path, tmp_path: Path) -> None:
    source = tmp_path / "mine.tar"
    shutil.copy(archives / "ILSVRC2012_img_train.tar", source)
    options = [ConvertOptions(allow_partial=True, check_md5=check) for check in (False, True)]

    roots = {
        convert(source, tmp_path / str(n), split="train", options=o, workers=0)[0].manifest.root
        for n, o in enumerate(options)
    }

    assert len(roots) == 1


def bad_tree(folder: Path, photographs: Path) -> Path:
    """Two good images, one file that is no image, and one with valid markers that does not decode."""
    (folder / "cat").mkdir(parents=True)
    for name in ("a.jpg", "b.jpg"):
        shutil.copy(photographs / "coffee.jpg", folder / "cat" / name)
    (folder / "cat" / "none.jpg").write_bytes(b"GIF89a")
    data = bytearray((photographs / "coffee.jpg").read_bytes())
    at = data.index(b"\xff\xc4") + 5
    data[at : at + 16] = b"\xff" * 16
    (folder / "cat" / "undecodable.jpg").write_bytes(data)
    return folder


@pytest.fixture
def photographs() -> Path:
    return ROOT / "formats/data/photographs"


@pytest.mark.slow
def test_where_a_source_lies_changes_nothing(tmp_path: Path, photographs: Path) -> None:
    sources = [bad_tree(tmp_path / name / "data", photographs) for name in ("here", "there")]

    roots = {
        converted(s, tmp_path / f"out{n}", on_bad_image="skip", decode_check=True).root
        for n, s in enumerate(sources)
    }

    assert len(roots) == 1
    assert str(tmp_path) not in (tmp_path / "out0" / "quarantine.json").read_text()


@pytest.mark.slow
def test_a_decode_check_is_part_of_the_plan(tmp_path: Path, photographs: Path) -> None:
    source = bad_tree(tmp_path / "source", photographs)
    checked = converted(source, tmp_path / "out", on_bad_image="skip", decode_check=True)
    before = tree(tmp_path / "out")
    next((tmp_path / "out").glob("shard-*")).unlink()

    assert checked.skipped == 2
    assert repair(tmp_path / "out", source, workers=0).findings == []
    assert tree(tmp_path / "out") == before
    with pytest.raises(PlanMismatch):
        converted(source, tmp_path / "out", on_bad_image="skip")


def test_repair_leaves_intact_tables_alone_when_the_source_has_other_boxes(
    archives: Path, tmp_path: Path
) -> None:
    converted(archives, tmp_path / "out")
    source = Path(shutil.copytree(archives, tmp_path / "source"))
    shutil.copy(source / "ILSVRC2012_bbox_val_v3.tgz", source / "ILSVRC2012_bbox_train_v2.tar.gz")
    (tmp_path / "out" / "boxes.npy").unlink()
    flip(tmp_path / "out" / "index.npy", 400)
    before = tree(tmp_path / "out")

    with pytest.raises((DataError, PlanMismatch)):
        repair(tmp_path / "out", source, workers=0)

    assert tree(tmp_path / "out").items() >= {k: v for k, v in before.items() if k != "index.npy"}.items()


def test_a_finished_dataset_that_cannot_be_written_to_is_still_complete(
    archives: Path, tmp_path: Path
) -> None:
    converted(archives, tmp_path / "out")
    (tmp_path / "out").chmod(0o555)
    inodes = {p.name for p in (tmp_path / "out").iterdir()}

    converted(archives, tmp_path / "out")

    assert {p.name for p in (tmp_path / "out").iterdir()} == inodes


def test_a_swapped_shard_is_noticed_when_it_is_read(archives: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "out"
    converted(archives, dataset, shard_size=1)
    sizes: dict[int, list[Path]] = {}
    for shard in sorted(dataset.glob("shard-*")):
        sizes.setdefault(shard.stat().st_size, []).append(shard)
    first, second = next(s for s in sizes.values() if len(s) > 1)[:2]
    data = first.read_bytes()
    writable(first).write_bytes(second.read_bytes())
    writable(second).write_bytes(data)

    with open_dataset(dataset) as ds, pytest.raises(CorruptRecord, match="does not match"):
        for _ in ds:
            pass


def test_more_shards_than_descriptors_can_be_read(archives: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert(archives, output, split="train", plan_options=PlanOptions(shard_size=1), workers=0)
    index = json.loads((output / "manifest.json").read_bytes())["shards"]
    reads = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
from shardprep.formats import open_dataset
from shardprep.formats.shards import read as shard_cache
shard_cache.MAX_OPEN = 8
with open_dataset({str(output)!r}) as ds:
    print(sum(1 for _ in ds))
"""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", reads], capture_output=True, text=True, check=True)

    assert int(done.stdout) == len(index) > 20
    assert MAX_OPEN <= 256
