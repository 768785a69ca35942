"""A published dataset is the local one, byte for byte, or there is an error; a copy repairs another."""

import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import BaseError

from shardprep.formats import PublishedDataset, fetch, join, publish, repair
from shardprep.formats.errors import ManifestDamaged, PlanMismatch, ShardDamaged, UsageError
from shardprep.formats.runtime.work_folder import CACHE_LOCK_NAME
from shardprep.formats.storage import store as remote_folder
from shardprep.formats.storage.store import Location, RemoteFailed, RemoteMissing, RetryPolicy
from shardprep.formats.transfer import repair as refetching
from shardprep.formats.transfer.publish import CLAIM_NAME, StorePlace
from support.datasets import StopAfter, flip, prep, prep_here, tree
from support.faulty_proxy import Proxy
from support.sampling import torture_except
from support.scripts import killed
from support.source_builders import write

SHARD = "shard-00000.h5"


def published(folder: Path, url: str) -> list[PublishedDataset]:
    """Publish with few retries, so that what fails does so soon."""
    return publish(folder, url, retries=1, timeout_s=20)


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize("part", torture_except([8 << 20, 1 << 14], 1 << 14))
def test_a_published_folder_of_splits_is_the_local_one_and_a_rerun_sends_what_is_missing_or_damaged(
    local: Path, bucket: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(remote_folder, "PART_BYTES", part)

    done = published(local, url)
    again = published(local, url)

    assert tree(bucket) == tree(local)
    assert [one.url for one in done] == [f"{url}/train", f"{url}/val"]
    for one, other in zip(done, again, strict=True):
        files = {file.name for file in one.manifest.files}
        assert (set(one.uploaded), one.kept, one.already_complete) == (files, (), False)
        assert (set(other.kept), other.uploaded, other.already_complete) == (files, (), True)
    fetch(url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(local)

    flip(bucket / "train" / SHARD, 5000)
    (bucket / "train/index.npy").unlink()
    mended, _ = published(local, url)
    assert set(mended.uploaded) == {SHARD, "index.npy"}
    assert tree(bucket) == tree(local)


@pytest.mark.parametrize("opaque", [False, True], ids=["MD5", "read back"])
@pytest.mark.parametrize("fault", torture_except(["500", "cut", "flip", "lost"], "flip", "lost"))
def test_a_file_that_is_not_received_as_it_was_sent_is_sent_anew_whatever_the_etags_are(
    local: Path, bucket: Path, url: str, proxy: Proxy, fault: str, opaque: bool
) -> None:
    proxy.opaque = opaque
    proxy.sending = lambda path, count: fault if count == 1 and (fault != "lost" or SHARD in path) else None

    published(local / "train", url)

    assert tree(bucket) == tree(local / "train")


def test_a_local_file_that_is_damaged_is_not_uploaded(
    local: Path, bucket: Path, url: str, proxy: Proxy, tmp_path: Path
) -> None:
    damaged = Path(shutil.copytree(local / "train", tmp_path / "damaged"))
    flip(damaged / SHARD, 5000)

    with pytest.raises(ShardDamaged, match="prep repair"):
        published(damaged, url)
    (damaged / "manifest.json").unlink()
    with pytest.raises(ManifestDamaged, match="an unfinished one"):
        published(damaged, url)

    assert not {SHARD, "manifest.json"} & tree(bucket).keys()


def test_a_place_with_anything_else_or_that_cannot_be_made_is_named_and_left_alone(
    local: Path, bucket: Path, url: str, proxy: Proxy
) -> None:
    published(local / "train", url)
    write(bucket / "page/manifest.json", b"<html>")
    write(bucket / "cache" / CACHE_LOCK_NAME, b"")
    before = tree(bucket)
    write(bucket / "place/other/mine.txt", b"mine")

    for error, said, folder, place in (
        (PlanMismatch, "another dataset", local / "val", url),
        (UsageError, r"mine\.txt", local / "val", f"{url}/place/other"),
        (UsageError, "other/ does not belong", local / "val", f"{url}/place"),  # a folder of splits, say
        (UsageError, "cannot go into it", local, url),
        (RemoteMissing, "web page", local / "val", f"{url}/page"),
        (UsageError, "is in a cache", local / "val", (bucket / "cache/new").as_uri()),
        (UsageError, "in the folder of a dataset", local / "val", (local / "train/new").as_uri()),
    ):
        with pytest.raises(error, match=said):
            published(folder, place)
    for refused in ("http://127.0.0.1/x", "https://host/x", "s3://key:hunter2@bucket/x"):
        with pytest.raises(UsageError, match=r"(?s)^(?!.*hunter2)"):
            published(local / "val", refused)

    assert tree(bucket) == before | {"place/other/mine.txt": tree(bucket / "place/other")["mine.txt"]}
    assert not (local / "train/new").exists()
    with pytest.raises(NotADirectoryError, match=f"{__file__}/folder"):
        publish(local, (Path(__file__) / "folder").as_uri())
    mounted = Location(bucket.as_uri())
    with pytest.raises(RemoteFailed, match="no hard links"), remote_folder.translate_errors(mounted, "new"):
        raise BaseError("Unable to rename file: Operation not supported (os error 95)")  # of a mounted bucket


@pytest.mark.torture
def test_of_two_datasets_published_at_once_one_wins_and_the_other_gets_an_error(
    local: Path, bucket: Path, url: str, proxy: Proxy
) -> None:
    proxy.sending = lambda path, count: "slow"

    def outcome(split: str) -> str:
        try:
            published(local / split, url)
        except PlanMismatch:
            return "refused"
        return split

    for attempt in range(2):
        shutil.rmtree(bucket, ignore_errors=True)
        with ThreadPoolExecutor(2) as pool:
            ends = set(pool.map(outcome, ("train", "val") if attempt % 2 else ("val", "train")))

        (winner,) = ends - {"refused"}
        assert len(ends) == 2
        assert tree(bucket) == tree(local / winner)


def test_what_another_process_changes_before_the_end_is_found(
    local: Path, bucket: Path, url: str, proxy: Proxy
) -> None:
    def meddle(path: str, count: int) -> None:
        if path.endswith("index.npy") and (bucket / SHARD).exists():
            (bucket / SHARD).write_bytes(b"another")

    proxy.sending = meddle

    with pytest.raises(RemoteFailed, match="changed or removed"):
        publish(local / "train", url, at_once=1)

    assert not (bucket / "manifest.json").exists()


def test_a_damaged_claim_of_a_killed_uploader_is_replaced(local: Path, tmp_path: Path) -> None:
    write(tmp_path / "out" / CLAIM_NAME, b'{"dataset":"sha')

    published(local / "train", (tmp_path / "out").as_uri())

    assert tree(tmp_path / "out") == tree(local / "train")


def test_a_folder_of_any_name_is_that_of_its_url(local: Path, tmp_path: Path) -> None:
    there = tmp_path / os.fsdecode(b"a \xff%41")

    published(local / "train", there.as_uri())
    fetch(there.as_uri(), tmp_path / "copy")

    assert tree(there) == tree(tmp_path / "copy") == tree(local / "train")


def test_what_another_run_of_the_same_job_writes_again_before_the_end_is_accepted(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = StorePlace.finish

    async def late(*arguments: Any) -> None:
        shutil.copy(local / "train" / SHARD, tmp_path / "out")  # has another time, and so another ETag
        await finish(*arguments)

    monkeypatch.setattr(StorePlace, "finish", late)
    published(local / "train", (tmp_path / "out").as_uri())

    assert tree(tmp_path / "out") == tree(local / "train")


def test_the_command_says_what_was_published(local: Path, url: str, proxy: Proxy) -> None:
    proxy.sending = lambda path, count: "slow"
    with pytest.raises(KeyboardInterrupt) as stop:
        publish(local / "train", f"{url}-2", at_once=1, progress=StopAfter(9))
    proxy.sending = lambda path, count: None
    first = prep_here("publish", local / "train", url, "--json", "--quiet")
    proxy.asked.clear()
    proxy.fault = lambda path, count: "flip" if path.endswith("manifest.json") and count % 3 else None
    second = prep_here("publish", local / "train", url)
    wrong = prep_here("publish", local / "val", url)

    assert " files are uploaded; run it again to continue" in stop.value.__notes__[0]
    (split,) = json.loads(first.stdout)["splits"]
    assert (first.returncode, split["url"], split["kept"], split["split"]) == (0, url, [], "train")
    assert "was complete" in second.stdout
    assert (wrong.returncode, url in wrong.stderr) == (2, True)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in first.stdout + second.stdout + wrong.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kills", torture_except([1, 3, 15], 1))
def test_a_publishing_killed_at_random_moments_ends_with_the_same_bytes(
    local: Path, bucket: Path, url: str, proxy: Proxy, kills: int
) -> None:
    faults, chosen = ["slow", "slow", "cut", "503", "flip"], random.Random(0)
    for _ in range(kills):
        proxy.sending = lambda path, count: chosen.choice(faults[: 3 if path.endswith("upload.json") else 5])
        killed(chosen.uniform(0.5, 2.0), "publish", local, url)
        for manifest in bucket.rglob("manifest.json"):
            there, wanted = tree(manifest.parent), tree(local / manifest.parent.name)
            assert there["manifest.json"] != wanted["manifest.json"] or there.items() >= wanted.items()
        if tree(bucket) == tree(local):
            shutil.rmtree(bucket)

    proxy.sending = lambda path, count: None
    prep("publish", local, url, check=True)
    assert tree(bucket) == tree(local)


SECOND_SHARD = "shard-00001.h5"


def test_each_split_of_a_folder_is_repaired_from_a_copy_of_the_same_dataset_and_of_no_other(
    local: Path, url: str, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refetching, "PATIENT", RetryPolicy(retries=1, timeout_s=30.0))
    publish(local, url)
    copy = Path(shutil.copytree(local, tmp_path / "copy"))
    flip(copy / "train" / SECOND_SHARD, 5000)
    (copy / "train/shard-00002.h5").unlink()
    (copy / "train/mine.txt").write_text("mine")
    before = tree(copy)
    joined = Path(shutil.copytree(local / "train", tmp_path / "joined"))
    join(joined, {"again": local / "train"}, workers=0)
    flip(joined / SECOND_SHARD, 5000)

    assert repair(joined, url).rebuilt == (SECOND_SHARD,)
    with pytest.raises(PlanMismatch, match=f"damaged files, such as {SECOND_SHARD} with sha256:"):
        repair(copy / "train", f"{url}/val")
    with pytest.raises(UsageError, match="is the URL of a copy"):
        repair(copy / "train", f"{url}/train", root=copy)

    assert tree(copy) == before
    (copy / "train/mine.txt").unlink()
    done = prep_here("repair", copy, "--source", url, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    rebuilt = {split["dataset"][-5:]: split["rebuilt"] for split in json.loads(done.stdout)["splits"]}
    assert rebuilt["train"] == [SECOND_SHARD, "shard-00002.h5"]
    assert tree(copy) == tree(local)
    fetch(url, tmp_path / "again")
    assert tree(tmp_path / "again") == tree(local)
