"""What servers, and the proxies before them, do wrong delays a fetch, or is an error that says what it is."""

import time
from pathlib import Path

import pytest

from shardprep.formats import FetchedDataset, fetch
from shardprep.formats.storage import store as remote_folder
from shardprep.formats.storage.store import AnswerBroken, RemoteDenied, RemoteFailed
from support.datasets import prep_here, tree
from support.faulty_proxy import Proxy

SHARD = "shard-00000.lmdb"


def fetched(url: str, folder: Path, timeout_s: float = 5.0) -> list[FetchedDataset]:
    return fetch(url, folder, retries=1, timeout_s=timeout_s)


def test_a_server_that_sends_a_byte_now_and_then_is_an_error_by_name(proxy: Proxy, tmp_path: Path) -> None:
    proxy.fault = lambda path, count: "drip" if path.endswith(SHARD) else None
    began = time.monotonic()

    with pytest.raises(AnswerBroken, match=r"bytes came in 0\.4 s"):
        fetched("s3://bucket/lmdb", tmp_path / "copy", timeout_s=0.2)

    assert time.monotonic() - began < 10


@pytest.mark.parametrize("scheme", ["http", pytest.param("s3", marks=pytest.mark.torture)])
@pytest.mark.parametrize("page", ["<html>Sign in</html>", "<Error><Code>InternalError</Code></Error>"])
def test_a_page_in_the_place_of_a_file_is_never_a_file(
    bucket: Path, proxy: Proxy, tmp_path: Path, scheme: str, page: str
) -> None:
    url = {"s3": "s3://bucket/lmdb", "http": f"{proxy.url}/bucket/lmdb"}[scheme]
    for spoilt, code in (("manifest.json", 1), (SHARD, 1)):
        proxy.fault = lambda path, count, spoilt=spoilt: f"body {page}" if path.endswith(spoilt) else None  # type: ignore[misc]
        done = prep_here("fetch", url, tmp_path / "copy", "--quiet")
        assert done.returncode == code, done.stderr
        assert spoilt in done.stderr

    proxy.fault = lambda path, count: f"body {page}" if path.endswith(".lmdb") and count == 1 else None
    fetched(url, tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(bucket / "lmdb")


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("403 RequestTimeTooSkewed", RemoteDenied, "the clock of this machine"),
        ("400 ExpiredToken", RemoteDenied, "the credentials have expired"),
        ("to http://127.0.0.2:9/inner", RemoteFailed, "redirects to another host"),
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
    proxy.fault = lambda path, count: fault if path.endswith((SHARD, "/bucket")) else None

    with pytest.raises(error, match=said):
        fetched("s3://bucket/nothing" if "List" in fault else "s3://bucket/lmdb", tmp_path / "copy")


def test_an_answer_that_says_it_is_longer_than_the_file_is_the_file(
    bucket: Path, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.fault = lambda path, count: "more" if path.endswith(".lmdb") else None

    fetched("s3://bucket/lmdb", tmp_path / "copy")

    assert tree(tmp_path / "copy") == tree(bucket / "lmdb")


@pytest.mark.parametrize(
    "url", ["http:me:hunter2@host/train", "me:hunter2@host:/train", "https://host/train;token=hunter2",
            "https:/me:hunter2@host/train", "https://me:hun/ter2@host/train"],
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
