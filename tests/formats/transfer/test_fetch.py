"""A fetched dataset is the published one, byte for byte, whatever a server sends, or there is an error."""

import json
import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from shardprep.formats import FetchedDataset, export, fetch, repair, verify
from shardprep.formats.errors import ManifestDamaged, OutputBusy, PlanMismatch, ShardprepError, UsageError
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.shards.read import FileEntry
from shardprep.formats.storage import store as remote_folder, transfer
from shardprep.formats.storage.store import (
    TRIES,
    AnswerBroken,
    NothingThere,
    RemoteDamaged,
    RemoteDenied,
    RemoteFailed,
    RemoteFolder,
    RemoteMissing,
)
from shardprep.formats.storage.transfer import Download
from support.datasets import StopAfter, flip, prep_here, tree
from support.faulty_proxy import HIDDEN, Proxy, Quiet, listening
from support.object_server import as_endpoint
from support.resealed import reseal
from support.sampling import torture_except

SHARD = "shard-00000.h5"
TRAIN = "s3://bucket/shards/train"

ALWAYS = {
    "cut": AnswerBroken,
    "stall": AnswerBroken,
    "short": RemoteDamaged,
    "long": RemoteDamaged,
    "flip": RemoteDamaged,
    "404": RemoteMissing,
    "403": RemoteDenied,
    "500": RemoteFailed,
    "503": RemoteFailed,
    "body <html>Sign in</html>": RemoteDamaged,
}


def fetched(url: str, folder: Path, **options: object) -> list[FetchedDataset]:
    """Fetch with few retries, so that what fails does so soon."""
    return fetch(url, folder, **{"retries": 1, "timeout_s": 10.0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("mend", [fetch, lambda url, folder: repair(folder, url)], ids=["fetch", "repair"])
def test_a_link_in_place_of_a_file_is_replaced_by_the_file(
    mend: Callable[[str, Path], object], bucket: Path, tmp_path: Path
) -> None:
    url, copy = (bucket / "shards/train").as_uri(), tmp_path / "copy"
    fetch(url, copy)
    (copy / SHARD).rename(tmp_path / "elsewhere")
    (copy / SHARD).symlink_to(tmp_path / "elsewhere")

    mend(url, copy)

    assert not (copy / SHARD).is_symlink()
    assert verify(copy).exit_code == 0
    assert (tmp_path / "elsewhere").read_bytes() == (copy / SHARD).read_bytes()


@pytest.mark.parametrize("scheme", ["s3", "http", "file"])
@pytest.mark.parametrize("name", ["lmdb", "columns", "shards/"])
def test_a_copy_of_a_dataset_or_of_each_split_of_a_folder_is_the_dataset_byte_for_byte(
    bucket: Path, proxy: Proxy, tmp_path: Path, name: str, scheme: str
) -> None:
    faults = {"/bucket": "403", "/bucket/lmdb/shard-00000.lmdb": "more"}  # no right to list; a wrong length
    faults["/bucket/shards/manifest.json"] = "body <html>a page for every path</html>"
    proxy.fault = lambda path, count: faults.get(path)
    urls = {"s3": "s3://bucket", "http": f"{proxy.url}/bucket", "file": f"file://{bucket}"}

    done = fetched(f"{urls[scheme]}/{name}", tmp_path / "copy")

    assert tree(tmp_path / "copy") == tree(bucket / name)
    assert [one.path.name for one in done] == (["train", "val", "test"] if name == "shards/" else ["copy"])
    for one in done:
        assert verify(one.path).exit_code == 0
        assert (one.complete, one.kept) == (True, ())
        assert set(one.fetched) == {file.name for file in one.manifest.files}


def test_a_split_that_is_not_published_yet_a_hostile_manifest_and_what_is_no_place_write_nothing(
    bucket: Path, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.fault = lambda path, count: "404" if path.endswith("val/manifest.json") else None

    with pytest.raises(NothingThere, match=f"{tmp_path}: manifest.json: is not there"):  # not .../train
        fetched(tmp_path.as_uri(), tmp_path / "copy")
    hostile = Path(shutil.copytree(bucket / "lmdb", tmp_path / "hostile"))
    reseal(hostile, lambda manifest: manifest["shards"][0].update(name="../escaped"))

    with pytest.raises(NothingThere, match="s3://bucket/shards/val"):
        fetched("s3://bucket/shards", tmp_path / "copy")
    with pytest.raises(ManifestDamaged):
        fetched(f"file://{hostile}", tmp_path / "copy")
    (hostile / "manifest.json").write_bytes(b"\x1f\x8b")
    with pytest.raises(RemoteDamaged, match="sent compressed"):
        fetched(f"file://{hostile}", tmp_path / "copy")
    for url in ("shards", "ftp://host/train", "s3://", "file://shards", "https:///"):
        with pytest.raises(UsageError, match="is not a URL"):
            fetch(url, tmp_path / "copy")

    assert {path.name for path in tmp_path.iterdir()} == {"hostile"}


@pytest.mark.parametrize("fault", torture_except(ALWAYS, "flip", "long", "403"))
def test_an_answer_that_is_always_wrong_is_an_error_and_never_a_file(
    bucket: Path, proxy: Proxy, tmp_path: Path, fault: str
) -> None:
    proxy.fault = lambda path, count: fault if path.endswith(SHARD) else None

    with pytest.raises(ALWAYS[fault]) as caught:
        fetched(TRAIN, tmp_path / "copy", timeout_s=0.5 if fault == "stall" else 10.0)

    assert (caught.value.path, caught.value.shard) == (TRAIN, SHARD)
    assert HIDDEN not in str(caught.value)
    assert not {SHARD, "manifest.json"} & tree(tmp_path / "copy").keys()
    more = 8 if fault.split()[0] in ("cut", "stall", "short", "body") else 0  # for what each brings
    assert len(proxy.ranges_of(SHARD)) <= TRIES + more

    proxy.fault = lambda path, count: None
    fetched(TRAIN, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(bucket / "shards/train")


def test_what_was_received_of_a_file_is_not_asked_for_again(
    bucket: Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_folder, "CHUNK_BYTES", 1 << 12)
    proxy.fault = lambda path, count: "cut" if path.endswith(SHARD) else None
    with pytest.raises(AnswerBroken):
        fetched(TRAIN, tmp_path / "copy")
    proxy.asked.clear()
    (size,) = (part.stat().st_size for part in (tmp_path / "copy" / ".prep").glob(f"*{SHARD}*"))

    proxy.fault = lambda path, count: None
    (done,) = fetched(TRAIN, tmp_path / "copy")

    assert size > 0
    assert proxy.ranges_of(SHARD) == [f"bytes={size}-"]
    assert SHARD in done.fetched
    assert tree(tmp_path / "copy") == tree(bucket / "shards/train")


def test_an_interruption_does_not_wait_until_a_large_file_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, remote = FileEntry(SHARD, 1 << 20, "sha256:" + 64 * "0", 1), cast("RemoteFolder", None)
    (tmp_path / SHARD).write_bytes(bytes(entry.size))
    monkeypatch.setattr(transfer, "SLICE_BYTES", 1)
    download = Download(remote, entry, final=tmp_path / SHARD, part=tmp_path / "part")

    def tick() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), LoopThread(threads=1) as loop:
        loop.run(download.run(), tick)

    assert 0 < download.done < entry.size


def test_splits_and_datasets_are_not_mixed_and_wrong_arguments_are_refused(
    bucket: Path, tmp_path: Path
) -> None:
    fetched(f"file://{bucket}/shards/val", tmp_path / "copy", shards=np.array([0]))

    wrong: tuple[tuple[str, str, dict[str, object], str], ...] = (
        ("shards", "copy", {}, "cannot go into it"),
        ("shards", "other", {"shards": [0]}, "give one of them"),
        ("shards/val", "", {}, "is not empty"),
        ("shards/val", "copy/a/b", {}, "in the folder of a dataset"),
        ("shards/val", "other", {"shards": np.array([0, 99])}, r"has the shards 0 to \d+, not 99"),
        ("shards/val", "other", {"shards": [0.5]}, "the number of a shard must be a whole number"),
        ("shards/val", "other", {"at_once": 0}, "at_once must be a whole number, at least 1, not 0"),
        ("shards/val", "other", {"retries": 1.5}, "retries must be a whole number"),
        ("shards/val", "other", {"timeout_s": float("inf")}, "timeout_s must be a number of seconds"),
    )
    for name, folder, options, said in wrong:
        with pytest.raises(UsageError, match=said):
            fetched(f"file://{bucket}/{name}", tmp_path / folder, **options)


def test_another_dataset_and_another_process_are_left_alone(bucket: Path, tmp_path: Path) -> None:
    fetched(f"file://{bucket}/lmdb", tmp_path / "copy", shards=[0])
    before = tree(tmp_path / "copy")

    with pytest.raises(PlanMismatch, match=r"unfinished fetch: dataset changed; .* or remove"):
        fetched(f"file://{bucket}/columns", tmp_path / "copy")
    with pytest.raises(PlanMismatch, match="holds an unfinished fetch; run the command that began it again"):
        export(bucket / "lmdb", tmp_path / "copy", to="webdataset", workers=0)
    with WorkFolder(tmp_path / "copy"), pytest.raises(OutputBusy):
        fetched(f"file://{bucket}/lmdb", tmp_path / "copy")

    assert tree(tmp_path / "copy") == before
    fetched(f"file://{bucket}/lmdb", tmp_path / "copy")
    meanwhile = StopAfter(1, lambda: shutil.copytree(bucket / "lmdb", tmp_path / "val"))
    for name, folder in (("columns", "copy"), ("shards", "")):
        with pytest.raises(PlanMismatch, match="a different dataset"):
            fetched(f"file://{bucket}/{name}", tmp_path / folder, progress=meanwhile)
    assert verify(tmp_path / "val").findings == []


def test_the_command_tells_what_was_fetched_and_a_rerun_mends_what_is_damaged_or_missing(
    bucket: Path, proxy: Proxy, tmp_path: Path
) -> None:
    words = ("fetch", TRAIN, tmp_path / "copy")

    first = prep_here(*words, "--shards", "0,1-1", "--json", "--quiet")
    assert "run the same command without --shards" in prep_here(*words, "--shards", "0").stdout
    second = prep_here(*words, "--progress", "plain")
    for wrong in ("0-999", "3-", f"0-{1 << 64}"):
        assert prep_here("fetch", TRAIN, tmp_path / "other", "--shards", wrong).returncode == 2

    (split,) = json.loads(first.stdout)["splits"]
    assert (first.returncode, split["complete"], split["split"], split["url"]) == (0, False, "train", TRAIN)
    assert "all intact" in second.stdout
    assert "files are fetched already" in second.stderr
    assert json.loads(prep_here(*words, "--json", "--quiet").stdout)["splits"][0]["fetched_bytes"] == 0

    flip(tmp_path / "copy" / SHARD, 5000)
    (tmp_path / "copy/index.npy").unlink()
    (done,) = fetched(TRAIN, tmp_path / "copy")
    assert set(done.fetched) == {SHARD, "index.npy"}
    assert tree(tmp_path / "copy") == tree(bucket / "shards/train")


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("drip", AnswerBroken, "bytes arrived in 1 s"),
        ("403 RequestTimeTooSkewed", RemoteDenied, "the clock of this machine"),
        ("400 ExpiredToken", RemoteDenied, "the credentials have expired; renew them"),
        ("400 RequestTimeout", RemoteFailed, "try again"),
        ("421 MisdirectedRequest", RemoteFailed, "try again"),
        ("425 TooEarly", RemoteFailed, "try again"),
        ("403 InvalidObjectState", RemoteDenied, "restore it there first"),
        ("501 NotImplemented", RemoteFailed, "check the URL"),
        ("to http://127.0.0.2:9/inner", RemoteFailed, "redirects to another host"),
        ("to ?again", RemoteFailed, "redirects in a circle; check the URL"),
        ("body <ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>"
         "</ListBucketResult>", RemoteFailed, "did not finish listing"),
    ],
)  # fmt: skip
def test_a_bucket_that_misbehaves_is_an_error_that_says_how(
    proxy: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.setattr(remote_folder, "LISTING_S", 0.5)
    proxy.fault = lambda path, count: fault if path.endswith(("shard-00000.lmdb", "/bucket")) else None
    url = "s3://bucket/nothing" if "List" in fault else "s3://bucket/lmdb"

    with pytest.raises(error, match=said) as caught:  # soon, and not after hours
        fetched(url, tmp_path / "copy", timeout_s=0.5 if fault == "drip" else 10.0)

    assert "Error performing" not in "".join(traceback.format_exception(caught.value))  # as obstore says it


@pytest.mark.parametrize(
    "url", ["http:me:hunter2@host/train", "me:hunter2@host:/train", "https://host/train;token=hunter2",
            "https:/me:hunter2@host/train", "https://me:hun/ter2@host/train", "s3://key:hunter2@bucket/train",
            "https://host/train?X-Amz-Signature=hunter2", "https://host/t#hunter2",
            "http://127.0.0.1:99999/train", "s3://bucket//train"],
)  # fmt: skip
@pytest.mark.parametrize("words", [("convert", "archives", "URL"), ("fetch", "URL", "copy"), ("verify", "URL"),
                                   ("repair", "copy", "--source", "URL"), ("publish", ".", "URL")])  # fmt: skip
def test_a_misspelt_url_is_refused_makes_no_folder_and_shows_no_secret(
    tmp_path: Path, url: str, words: tuple[str, ...]
) -> None:
    done = prep_here(*(url if word == "URL" else word for word in words), cwd=tmp_path)

    assert done.returncode == 2
    assert "ter2" not in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


CREDENTIALS = """
[default]
aws_access_key_id = AKIADEFAULT
aws_secret_access_key = 50%secret
[work]
aws_access_key_id = AKIAWORK
aws_secret_access_key = secret
aws_session_token = a-token
"""
CONFIG = """
[default]
region = eu-west-1
s3 =
    max_concurrent_requests = 20
[profile work]
region = ap-south-1
[profile sso]
sso_session = company
region = us-west-2
"""


KEYS = {"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": "x"}


class Seen(Quiet):
    signatures: list[str]

    def do_GET(self) -> None:  # noqa: N802
        found = re.search("Credential=([^/]+)/[^/]+/([^/]+)/", self.headers.get("Authorization", ""))
        self.signatures.append(
            " ".join((*found.groups(), self.headers.get("X-Amz-Security-Token", ""))).strip() if found else ""
        )
        self.send_error(404)

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def signatures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What a server of S3 is signed with, while the environment has an endpoint and a home with profiles."""
    handler = type("Handler", (Seen,), {"signatures": []})
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(CREDENTIALS)
    (tmp_path / ".aws" / "config").write_text(CONFIG)
    with listening(handler) as port:
        as_endpoint(f"http://127.0.0.1:{port}", monkeypatch)
        for name in [name for name in os.environ if name.startswith("AWS_") and "ENDPOINT" not in name]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("HOME", str(tmp_path))
        yield handler.signatures


@pytest.mark.parametrize(
    ("environ", "signed", "code", "said"),
    [
        ({}, {"AKIADEFAULT eu-west-1"}, 3, "404"),
        ({"AWS_PROFILE": "default"}, {"AKIADEFAULT eu-west-1"}, 3, "404"),
        ({"AWS_PROFILE": "work"}, {"AKIAWORK ap-south-1 a-token"}, 3, "404"),
        ({"AWS_PROFILE": "work", "AWS_REGION": "eu-north-1"}, {"AKIAWORK eu-north-1 a-token"}, 3, "404"),
        (KEYS, {"AKIAENV eu-west-1"}, 3, "404"),
        ({"AWS_SKIP_SIGNATURE": "true"}, {""}, 3, "404"),
        ({"AWS_PROFILE": "sso"}, set(), 2, "'sso', which AWS_PROFILE names, has no keys; eval"),
        ({"AWS_PROFILE": "misspelt"}, set(), 2, "'misspelt', which AWS_PROFILE names, is not in ~/.aws; c"),
        ({"AWS_ACCESS_KEY_ID": "AKIAENV"}, set(), 3, "there are no credentials"),
        ({"AWS_ENDPOINT_URL": "host:9000"}, set(), 2, "AWS_ENDPOINT_URL is 'host:9000', not a URL"),
        ({"AWS_ENDPOINT_URL": "ftp://host"}, set(), 2, "not a URL"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:99999"}, set(), 2, "not a URL"),
        (KEYS | {"ALL_PROXY": "http://127.1:9", "AWS_ENDPOINT_URL": "https://region"}, set(), 3, "es; try a"),
        ({"AWS_CONFIG_FILE": __file__}, set(), 2, "test_fetch.py: is not a valid file of profiles"),
    ],
    ids=str,
)
def test_keys_endpoint_and_proxy_are_those_of_the_environment_then_of_the_profile_or_an_error_says_what_to_do(
    environ: dict[str, str],
    signed: set[str],
    code: int,
    said: str,
    signatures: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShardprepError, match=said) as raised:
        fetch("s3://bucket/train", tmp_path / "copy", retries=0)

    assert (set(signatures), raised.value.exit_code) == (signed, code)
    assert "secret" not in str(raised.value)
