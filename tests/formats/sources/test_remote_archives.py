"""Archives in object storage are converted in place, as those on a disk are, or there is an error."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from shardprep.formats import ConvertOptions, PlanOptions, SourceDamaged, UsageError, convert, convert_part
from shardprep.formats.sources import tar
from shardprep.formats.sources.ilsvrc import find_remote_tars
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.tar import BLOCK
from shardprep.formats.storage import archive as remote_archive
from shardprep.formats.storage.store import (
    AnswerBroken,
    Location,
    NothingThere,
    RangeRefused,
    RemoteDenied,
    RemoteFailed,
    RemoteFolder,
    RetryPolicy,
    StoredFile,
)
from support.datasets import converted, prep, prep_here, tree
from support.faulty_proxy import HIDDEN, Proxy
from support.sampling import torture_except

URL = "s3://bucket/archives"
TRAIN = "ILSVRC2012_img_train.tar"
VAL = "ILSVRC2012_img_val.tar"

ALWAYS = {
    **dict.fromkeys(("cut", "short", "shift"), AnswerBroken),
    "altered": SourceDamaged, "whole": RangeRefused, "403": RemoteDenied, "503": RemoteFailed,
}  # fmt: skip


@pytest.fixture(scope="module")
def buckets(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the server's buckets, of which one has the archives."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copytree(archives, folder / "bucket" / "archives")
    (folder / "bucket" / "other").mkdir()
    return folder


@pytest.fixture(autouse=True)
def _few_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "PATIENT", RetryPolicy(retries=1, timeout_s=20))


def asked_of(proxy: Proxy, name: str) -> list[tuple[int, int]]:
    """The start and the end of each range of a file that was asked for; a whole file is an error."""
    ranges = [found.removeprefix("bytes=").split("-") for found in proxy.ranges_of(name) if found is not None]
    assert len(ranges) == len(proxy.ranges_of(name)), "a whole file was asked for"
    return [(int(start), int(last) + 1) for start, last in ranges]


@pytest.mark.parametrize(
    "scheme",
    ["s3", pytest.param("http", marks=pytest.mark.torture), pytest.param("file", marks=pytest.mark.slow)],
)
def test_the_result_is_that_of_a_local_conversion_and_only_its_bytes_are_read(
    archives: Path, buckets: Path, proxy: Proxy, tmp_path: Path, scheme: str
) -> None:
    urls = {"s3": URL, "http": f"{proxy.url}/bucket/archives", "file": f"file://{buckets}/bucket/archives"}
    options = PlanOptions(container="hdf5" if scheme == "http" else "lmdb", shard_size=60_000)
    done = convert(archives, tmp_path / "local", plan_options=options, workers=0)

    read = convert(urls[scheme], tmp_path / "remote", plan_options=options, workers=0)

    assert tree(tmp_path / "remote") == tree(tmp_path / "local")
    assert [one.manifest.root for one in read] == [one.manifest.root for one in done]
    if scheme != "file":
        size = sum(one.manifest.image_bytes for one in done)
        asked = [end - start for name in (TRAIN, VAL, "test.tar") for start, end in asked_of(proxy, name)]
        assert size <= sum(asked) < 1.5 * size


@pytest.mark.torture
def test_workers_convert_from_a_bucket_into_a_bucket(
    archives: Path, buckets: Path, proxy: Proxy, tmp_path: Path
) -> None:
    convert(archives, tmp_path / "local", workers=0)

    place = f"s3://bucket/{tmp_path.name}"
    prep("convert", URL, place, "--workers", 2, "--scratch", tmp_path / "scratch", "--quiet", check=True)

    assert tree(buckets / "bucket" / tmp_path.name) == tree(tmp_path / "local")


@pytest.mark.parametrize(
    ("fault", "after"),
    [(fault, 0) for fault in ALWAYS]
    + [pytest.param(fault, 50, marks=pytest.mark.slow if fault == "503" else pytest.mark.torture)
       for fault in ALWAYS if fault != "altered"],  # of an image: not known
)  # fmt: skip
def test_what_is_never_right_is_an_error_that_names_the_file_and_no_secret(
    proxy: Proxy, tmp_path: Path, fault: str, after: int
) -> None:
    proxy.fault = lambda path, count: fault if path.endswith(TRAIN) and count > after else None

    with pytest.raises(ALWAYS[fault], match="bucket/archives") as caught:
        converted(URL, tmp_path / "train")  # type: ignore[arg-type]

    assert HIDDEN not in str(caught.value)
    assert "AKIA" not in str(caught.value)
    assert not (tmp_path / "train" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("at", "size"), torture_except([(5, None), (60, None), (60, 5000)], (5, None), (60, 5000))
)
def test_an_archive_that_is_replaced_meanwhile_is_an_error(
    buckets: Path, proxy: Proxy, tmp_path: Path, at: int, size: int | None
) -> None:
    folder = buckets / "bucket" / tmp_path.name
    shutil.copytree(buckets / "bucket" / "archives", folder)

    def replace(path: str, count: int) -> None:
        if path.endswith(TRAIN) and count == at:
            data = bytearray((folder / TRAIN).read_bytes())
            data[len(data) // 2] ^= 1
            (folder / "new").write_bytes(data[:size])
            (folder / "new").replace(folder / TRAIN)

    proxy.fault = replace

    with pytest.raises(SourceDamaged, match="changed since it was listed"):
        converted(f"s3://bucket/{folder.name}", tmp_path / "train")  # type: ignore[arg-type]

    assert not (tmp_path / "train" / "manifest.json").exists()


@pytest.mark.parametrize("segment", torture_except([BLOCK, 3_333, 100_000], 100_000))
def test_headers_that_are_found_ahead_change_nothing_and_are_each_asked_for_once(
    archives: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, segment: int
) -> None:
    monkeypatch.setattr(tar, "SEGMENT_BYTES", segment)
    here, there = recognise(archives), find_remote_tars(Location.parse(URL))

    found, expected = (source.survey("val").entries for source in (there, here))

    assert found.tobytes() == expected.tobytes()
    blocks = [start for start, end in asked_of(proxy, VAL) if end - start == BLOCK]
    assert len(blocks) == len(set(blocks))
    assert {int(offset) - BLOCK for offset in expected["offset"]} <= set(blocks)


def test_a_check_of_md5_reads_each_archive_once_as_a_whole(
    archives: Path, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_archive, "PIECE_BYTES", 100_000)
    with pytest.raises(SourceDamaged, match=f"{URL}/{VAL}.* has MD5"):
        convert(URL, tmp_path / "val", split="val", options=ConvertOptions(check_md5=True), workers=0)

    pieces = sorted(one for one in asked_of(proxy, VAL) if one[1] - one[0] > BLOCK)
    assert (pieces[0][0], pieces[-1][1]) == (0, (archives / VAL).stat().st_size)
    assert all(end == start for (_, end), (start, _) in pairwise(pieces))


def test_a_web_server_may_deny_what_is_not_there(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    really = RemoteFolder.metadata

    async def metadata(folder: RemoteFolder, name: str) -> StoredFile:
        if (found := await really(folder, name)) is None:
            raise RemoteDenied("denies access")
        return found

    monkeypatch.setattr(RemoteFolder, "metadata", metadata)

    assert find_remote_tars(Location.parse(f"{proxy.url}/bucket/archives")).splits == ("train", "val", "test")
    with pytest.raises(RemoteDenied):
        find_remote_tars(Location.parse(f"{proxy.url}/bucket/other"))


def test_what_is_not_there_or_in_parts_is_an_error_that_leaves_no_file(proxy: Proxy, tmp_path: Path) -> None:
    for url, error, said in (
        ("s3://bucket/other", UsageError, r"s3://bucket/other.* none of the official tars"),
        ("s3://nothing/archives", NothingThere, "s3://nothing/archives"),
        ("ftp://host/archives", UsageError, "is not a URL with one of"),
    ):
        with pytest.raises(error, match=said):
            converted(url, tmp_path / "train")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be converted in parts"):
        convert_part(URL, tmp_path / "train", (1, 2))
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="only one machine can convert"):
        convert(URL, tmp_path / "train", executor=pool)
    assert prep_here("convert", URL, tmp_path / "train", "--part", "1/2").returncode == 2
    proxy.fault = lambda path, count: "whole" if path.endswith("gz") else None
    assert prep("convert", URL, tmp_path / "train", prefix=("env", f"TMPDIR={tmp_path}")).returncode == 3
    assert not [*tmp_path.iterdir()]
