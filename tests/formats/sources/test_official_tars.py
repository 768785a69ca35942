import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest

from shardprep.formats.errors import (
    DataError,
    LabelConflict,
    SourceDamaged,
    SourceIncomplete,
    UsageError,
)
from shardprep.formats.records.labels import official_words
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import Listing
from support.source_builders import (
    BLOCK,
    DEVKIT,
    TEST,
    TRAIN,
    VAL,
    Miniature,
    contents,
    header,
    headers_in,
    tar_of,
)

MINI = Miniature()
END = bytes(2 * BLOCK)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    return MINI.write_tars(tmp_path / "tars")


def rows(listing: Listing) -> list[tuple[object, ...]]:
    return list(listing.entries.tolist())


def all_headers(train: bytes) -> list[int]:
    """The offsets of the headers of the outer tar, and of each tar in it."""
    outer = headers_in(train)
    return outer + [at for start in outer for at in headers_in(train, start + BLOCK)]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_images_are_read_in_place_with_key_and_label(split: str, tars: Path) -> None:
    listing = recognise(tars).listing(split)
    assert contents(listing) == MINI.records[split]
    assert (listing.layout, listing.split) == ("official-tars", split)
    assert listing.expected == {"train": 6, "val": 4, "test": None}[split]
    assert listing.shortfall == ""


def test_the_description_says_what_was_found(tars: Path) -> None:
    assert recognise(tars).description == "official-tars: train, val, test with devkit (3 classes)"


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_single_tar_is_recognised_by_what_is_in_it(split: str, tars: Path) -> None:
    path = tars / {"train": TRAIN, "val": VAL, "test": TEST}[split]
    renamed = path.rename(tars / "some.tar")
    source = recognise(renamed)
    assert source.splits == (split,)
    assert contents(source.listing(split)) == MINI.records[split]


def test_archives_may_be_links_to_where_they_really_are(tars: Path, tmp_path: Path) -> None:
    folder = tmp_path / "links"
    folder.mkdir()
    for path in tars.iterdir():
        (folder / path.name).symlink_to(path)
    assert contents(recognise(folder).listing("train")) == MINI.records["train"]


@pytest.mark.parametrize("name", [TRAIN, DEVKIT, "LOC_val_solution.csv", "val.txt"])
def test_a_fifo_in_place_of_a_file_is_not_waited_for(name: str, tars: Path) -> None:
    (tars / name).unlink(missing_ok=True)
    os.mkfifo(tars / name)
    if name == "val.txt":
        assert len(recognise(tars).listing("val").entries) == 4
    else:
        with pytest.raises(SourceDamaged, match="is not a regular file"):
            [recognise(tars).listing(split) for split in ("train", "val")]


def test_the_patched_test_images_are_preferred(tars: Path) -> None:
    name = "ILSVRC2012_img_test_v10102019.tar"
    (tars / name).write_bytes((tars / TEST).read_bytes())
    assert recognise(tars).listing("test").archives[0].name == name


def test_a_new_file_beside_the_archives_becomes_no_image(tars: Path) -> None:
    assert recognise(tars).folders == ()


def test_the_listing_names_the_archives_it_is_from(tars: Path) -> None:
    archives = recognise(tars).listing("val").archives
    assert [(a.name, a.size, a.verified) for a in archives] == [
        (name, (tars / name).stat().st_size, "no") for name in (VAL, DEVKIT)
    ]


@pytest.mark.torture
def test_a_changed_byte_in_any_header_is_an_error_and_never_another_listing(tmp_path: Path) -> None:
    path = tmp_path / TRAIN
    wnids = ("n01440764", "n02100735")
    images = {w: tar_of({f"{w}_1.JPEG": b"one", f"{w}_2.JPEG": b"two"}) for w in wnids}
    train = tar_of({f"{w}.tar": tar for w, tar in images.items()})
    path.write_bytes(train)
    whole = rows(recognise(path).listing("train"))
    with path.open("r+b", buffering=0) as file:
        for start in all_headers(train):
            for at in range(start, start + BLOCK):
                os.pwrite(file.fileno(), bytes([train[at] ^ 0x01]), at)
                with suppress(DataError, UsageError):
                    assert rows(recognise(path).listing("train")) == whole
                os.pwrite(file.fileno(), train[at : at + 1], at)
    assert rows(recognise(path).listing("train")) == whole


@pytest.mark.parametrize("name", [TRAIN, VAL])
def test_an_archive_cut_off_at_any_block_is_an_error_or_has_lost_only_padding(name: str, tars: Path) -> None:
    path, split = tars / name, "train" if name == TRAIN else "val"
    tar, whole = path.read_bytes(), rows(recognise(path).listing(split))
    for end in range(0, len(tar), BLOCK):
        path.write_bytes(tar[:end])
        try:
            assert rows(recognise(path).listing(split)) == whole
            assert not tar[end:].strip(b"\0")
        except (DataError, UsageError):
            continue


def test_a_class_tar_cut_off_within_a_sound_archive_is_an_error(tars: Path) -> None:
    inner = MINI.class_tar("n01440764")
    for end in range(0, inner.rindex(b"\xd9"), BLOCK):
        (tars / TRAIN).write_bytes(tar_of({"n01440764.tar": inner[:end]}))
        with pytest.raises(SourceDamaged, match=r"n01440764\.tar"):
            recognise(tars).listing("train")


@pytest.mark.parametrize(
    "members",
    [
        {"n01440764.tar": tar_of({"n02100735_1.JPEG": b"x"})},
        {"n01440764.tar": tar_of({"n01440764_1.png": b"x"})},
        {"n01440764.tar": tar_of({"sub/n01440764_1.JPEG": b"x"})},
        {"n01440764.tar": tar_of({"n01440764_x.JPEG": b"x"})},
        {"n01440764.tar": END, "readme.txt": b"hello"},
        {"n01440764.tar": END, "n1.tar": END},
    ],
)
def test_a_member_of_another_name_is_an_error(members: dict[str, bytes], tars: Path) -> None:
    (tars / TRAIN).write_bytes(tar_of(members))
    with pytest.raises(SourceDamaged, match="does not belong here"):
        recognise(tars).listing("train")


def test_one_image_under_two_names_is_an_error_that_names_the_key(tars: Path) -> None:
    twice = tar_of({"n01440764_1.JPEG": b"x", "n01440764_1.jpg": b"y"})
    (tars / TRAIN).write_bytes(tar_of({"n01440764.tar": twice}))
    with pytest.raises(SourceDamaged, match="n01440764/n01440764_1: two images"):
        recognise(tars).listing("train")


def test_an_image_of_absurd_size_is_refused_before_it_is_read(tars: Path) -> None:
    with (tars / VAL).open("wb") as file:
        file.write(header("ILSVRC2012_val_00000001.JPEG", MAX_IMAGE_BYTES + 1))
        file.truncate(MAX_IMAGE_BYTES + 10 * BLOCK)
    with pytest.raises(SourceDamaged, match="has 67108865 bytes"):
        recognise(tars).listing("val")


def test_a_class_that_the_devkit_does_not_know_is_a_conflict(tars: Path) -> None:
    (tars / TRAIN).write_bytes(tar_of({"n01443537.tar": tar_of({"n01443537_1.JPEG": b"x"})}))
    with pytest.raises(LabelConflict, match="n01443537 is not in the devkit"):
        recognise(tars).listing("train")


def test_val_without_labels_is_an_error_that_says_what_to_add(tars: Path) -> None:
    (tars / DEVKIT).unlink()
    with pytest.raises(
        SourceIncomplete, match=r"devkit_t12\.tar\.gz, LOC_val_solution\.csv or Caffe's val\.txt"
    ):
        recognise(tars).listing("val")


def test_without_devkit_the_official_classes_and_numbers_are_expected(tars: Path) -> None:
    (tars / DEVKIT).unlink()
    listing = recognise(tars).listing("train")
    assert listing.labels.is_official
    assert listing.expected == 1_281_167
    assert "n01443537 has 0, n01484850 has 0" in listing.shortfall
    assert {
        k.decode(): label for k, label in zip(listing.entries["key"], listing.entries["label"], strict=True)
    } == {key: sorted(official_words()).index(key[:9]) for key in MINI.records["train"]}


def test_foreign_classes_without_devkit_are_their_own_label_space(tmp_path: Path) -> None:
    (tmp_path / TRAIN).write_bytes(tar_of({"n99999999.tar": tar_of({"n99999999_1.JPEG": b"x"})}))
    listing = recognise(tmp_path).listing("train")
    assert [c.name for c in listing.labels.classes] == ["n99999999"]
    assert listing.expected == 1_281_167


@pytest.mark.parametrize("authority", ["solution", "caffe"])
def test_val_takes_its_labels_from_kaggle_or_caffe_too(authority: str, tars: Path) -> None:
    (tars / DEVKIT).unlink()
    official = sorted(official_words())
    labels = {name: official.index(MINI.wnid_of_val(name)) for name in MINI.val_names}
    if authority == "solution":
        MINI.write_solution(tars)
    else:
        (tars / "val.txt").write_text("".join(f"{name}.JPEG {label}\n" for name, label in labels.items()))
    assert {key: label for key, (label, _) in contents(recognise(tars).listing("val")).items()} == labels


def test_missing_images_are_counted_and_named_by_class(tars: Path) -> None:
    (tars / TRAIN).write_bytes(tar_of({f"{w}.tar": MINI.class_tar(w) for w in MINI.wnids[:2]}))
    listing = recognise(tars).listing("train")
    assert (len(listing.entries), listing.expected) == (3, 6)
    assert listing.shortfall == "n02119789 has 0 of 3"


def test_a_missing_validation_image_is_named_and_moves_no_label(tars: Path) -> None:
    rest = {f"{name}.JPEG": b"x" for name in MINI.val_names if not name.endswith("2")}
    (tars / VAL).write_bytes(tar_of(rest))
    listing = recognise(tars).listing("val")
    assert listing.shortfall == "ILSVRC2012_val_00000002 is missing"
    expected = {key: label for key, (label, _) in MINI.records["val"].items()}
    assert all(expected[e["key"].decode()] == e["label"] for e in listing.entries)


def test_a_split_that_is_not_there_is_wrong_usage(tars: Path) -> None:
    (tars / TEST).unlink()
    with pytest.raises(UsageError, match="no split 'test'; it has train, val"):
        recognise(tars).listing("test")


def test_a_reader_travels_while_it_is_closed(tars: Path) -> None:
    listing = recognise(tars).listing("train")
    with pickle.loads(pickle.dumps(listing.reader)) as reader:  # noqa: S301 - made here
        assert reader.read(listing.entries[0]) == MINI.records["train"][listing.entries["key"][0].decode()][1]
        assert reader.where(listing.entries[0]) == f"{tars / TRAIN}, byte {listing.entries['offset'][0]}"


def test_a_closed_reader_does_not_read(tars: Path) -> None:
    listing = recognise(tars).listing("train")
    with pytest.raises(ValueError, match="closed"):
        listing.reader.read(listing.entries[0])


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(BLOCK))


def replace(path: Path) -> None:
    status = path.stat()
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
    copy.replace(path)


@pytest.mark.parametrize("change", [touch, grow, replace, Path.unlink])
def test_an_archive_that_changes_while_it_is_read_is_an_error(change: object, tars: Path) -> None:
    listing = recognise(tars).listing("train")
    with pytest.raises(SourceDamaged, match="changed while it was read"), listing.reader:
        change(tars / TRAIN)  # type: ignore[operator]


@pytest.mark.parametrize("change", [touch, grow, replace])
def test_an_archive_that_changed_since_it_was_listed_is_an_error(change: object, tars: Path) -> None:
    listing = recognise(tars).listing("train")
    change(tars / TRAIN)  # type: ignore[operator]
    with pytest.raises(SourceDamaged, match="changed while it was read"), listing.reader:
        pass


def test_an_archive_that_lost_its_end_is_an_error_at_the_image(tars: Path) -> None:
    listing = recognise(tars).listing("val")
    last = listing.entries[listing.entries["offset"].argmax()]
    reader = listing.reader.__enter__()
    os.truncate(tars / VAL, int(last["offset"]) + 1)
    with pytest.raises(SourceDamaged, match="ends before the image does"):
        reader.read(last)
    with pytest.raises(SourceDamaged, match="changed while it was read"):
        reader.__exit__(None, None, None)


def test_a_disk_error_stays_an_os_error_that_names_the_file(
    tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, length: int, offset: int) -> bytes:
        raise OSError(5, "Input/output error")

    listing = recognise(tars).listing("val")
    with listing.reader as reader:
        monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(OSError, match=VAL) as caught:
            reader.read(listing.entries[0])
    assert caught.value.errno == 5
