"""A dataset that is converted into a bucket is the one of a local conversion, or there is none."""

from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from shardprep.formats import ConvertedTo, PlanMismatch, PlanOptions, UsageError, convert, convert_to_url
from shardprep.formats.conversion import prepare, shard as build_shard
from shardprep.formats.errors import OperationError
from shardprep.formats.runtime.progress import NoProgress
from shardprep.formats.storage.store import RemoteDamaged, RemoteFailed
from shardprep.formats.transfer.publish import CLAIM_NAME, StorePlace
from support.column_sources import as_csv, rows_of, write_pictures
from support.datasets import flip, prep_here, tree
from support.faulty_proxy import HIDDEN, Proxy

OPTIONS = PlanOptions(container="hdf5", shard_size=60_000)


def stored(source: Path, url: str, scratch: Path, **options: object) -> list[ConvertedTo]:
    """Convert in this process with few retries."""
    given = {"plan_options": OPTIONS, "workers": 0, "retries": 1, "timeout_s": 20, **options}
    return convert_to_url(source, url, scratch=scratch, **given)  # type: ignore[arg-type]


@pytest.mark.slow
def test_each_split_has_the_bytes_of_a_local_conversion_and_the_scratch_is_removed(
    archives: Path, bucket: Path, url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = convert(archives, tmp_path / "local", plan_options=OPTIONS, workers=0)
    needed: list[dict[Path, int]] = []
    monkeypatch.setattr(prepare, "check_room", lambda found, **_: needed.append(found))

    done = stored(archives, url, tmp_path / "scratch")
    before = len(proxy.sent)
    again = stored(archives, url, tmp_path / "scratch")
    words = ("--format", "hdf5", "--shard-size", "60000", "--scratch", tmp_path / "scratch")
    assert "(was complete, and the sizes are right)" in prep_here("convert", archives, url, *words).stdout
    with pytest.raises(PlanMismatch, match="finished dataset"):
        stored(archives, f"{url}/val", tmp_path / "scratch", split="train")
    with pytest.raises(UsageError, match="cannot go into it"):
        stored(archives, f"{url}/val", tmp_path / "scratch")

    assert [path.name for path in needed[0]] == ["train"]  # the largest split
    assert tree(bucket) == tree(tmp_path / "local")
    assert [one.manifest.root for one in done] == [one.manifest.root for one in local]
    assert [one.already_complete for one in (*done, *again)] == [False] * len(done) + [True] * len(done)
    assert len(proxy.sent) == before
    assert not (tmp_path / "scratch").exists()
    (bucket / "val/index.npy").unlink()
    with pytest.raises(RemoteDamaged, match="differs from the manifest"):
        stored(archives, url, tmp_path / "scratch")


def test_a_user_without_a_home_is_told_to_name_a_scratch_folder(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))  # as of a container's user
    for caches in ("", "/dev/null"):  # no home, and one that is not writable
        monkeypatch.setenv("XDG_CACHE_HOME", caches)
        with pytest.raises(OperationError, match=r"no folder to build shards in .* --scratch"):
            convert_to_url(archives, (tmp_path / "out").as_uri())
    assert not list(tmp_path.iterdir())


def test_a_claim_that_was_left_beside_a_damaged_manifest_goes_with_the_next_run_which_sends_it_again(
    archives: Path, bucket: Path, url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(StorePlace, "drop_claim", AsyncMock())
        stored(archives, url, tmp_path / "scratch", split="val")
    left = tree(bucket)
    flip(bucket / "manifest.json", 0)

    stored(archives, url, tmp_path / "scratch", split="val")

    assert left.items() - tree(bucket).items() == {(CLAIM_NAME, left[CLAIM_NAME])}


def test_a_shard_that_is_there_takes_no_room_here_and_is_built_and_uploaded_again_only_if_it_was_changed(
    archives: Path, bucket: Path, url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "empty" / "scratch"
    proxy.sending = lambda path, count: "503" if "shard-00003" in path else None
    with pytest.raises(RemoteFailed) as caught:
        stored(archives, url, scratch, split="train")
    there, begun = tree(bucket), len(proxy.sent)
    changed = there.pop("shard-00001.h5")
    (bucket / "shard-00001.h5").write_bytes(b"another")
    assert HIDDEN not in str(caught.value)
    assert [path.name for path in scratch.glob("*.h5")] == ["shard-00003.h5"]
    proxy.sending = lambda path, count: None
    built: list[str] = []
    really = build_shard._write_shard
    monkeypatch.setattr(
        build_shard, "_write_shard", lambda job, *given: built.append(job.shard.name) or really(job, *given)
    )
    progress = Mock(wraps=NoProgress(), shards=Mock())

    (done,) = stored(archives, url, scratch, split="train", progress=progress)

    progress.shards.assert_called_with(len(built) - 1, len(built) - 1)  # the changed one was built before
    assert [*scratch.parent.iterdir()] == []
    assert {"shard-00000.h5", "shard-00002.h5"} <= there.keys()
    sent = [path.rpartition("/")[2] for path in proxy.sent[begun:]]
    assert not {"shard-00003.h5", *there} & set(built)
    assert not there.keys() & set(sent)
    assert tree(bucket)["shard-00001.h5"] == changed
    assert sent[-1] == "manifest.json"
    assert {file.name for file in done.manifest.files} | {"manifest.json"} == tree(bucket).keys()


def test_columns_are_stored_too(bucket: Path, url: str, proxy: Proxy, tmp_path: Path) -> None:
    source, names = tmp_path / "source", [f"{number}.png" for number in range(9)]
    write_pictures(source, names)
    (source / "metadata.csv").write_text(as_csv(rows_of(names)))
    (done,) = convert(source, tmp_path / "local", split="train", workers=0)
    assert len(done.manifest.column_files) == 4

    convert_to_url(source, url, scratch=tmp_path / "scratch", split="train", workers=0)

    assert tree(bucket) == tree(tmp_path / "local")


def test_what_makes_no_sense_is_refused_before_anything_is_read(archives: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="accepts no files"):
        stored(archives, "https://host/out", tmp_path / "scratch")
    with pytest.raises(UsageError, match="convert_to_url"):
        convert(archives, "s3://b/out")
    for words in (("s3://b/out", "--part", "1/2"), ("s3://b/out", "--dry-run"), ("out", "--scratch", "x")):
        assert prep_here("convert", archives, *words, cwd=tmp_path).returncode == 2
    done = prep_here("convert", archives, "s3://key:hunter2@b/out", cwd=tmp_path)
    assert (done.returncode, "hunter2" in done.stdout + done.stderr) == (2, False)
    assert not list(tmp_path.iterdir())
