import tarfile

import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.tar import MAX_EXTENSION_BYTES, Member, walk
from support.source_builders import BLOCK, header, headers_in, tar_of

END = bytes(2 * BLOCK)
LONG = "/".join(["folder"] * 20) + "/a.JPEG"
THREE = {"a.JPEG": b"a" * 700, "b.JPEG": b"", "c.JPEG": b"c" * 512}


def listed(tar: bytes) -> list[Member]:
    return list(walk(lambda length, offset: tar[offset : offset + length], archive="x.tar", end=len(tar)))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def record(text: str) -> bytes:
    """A pax record with its length in front, which counts its own digits."""
    body = f" {text}\n".encode()
    length = next(n for n in range(1000) if n == len(str(n)) + len(body))
    return str(length).encode() + body


def pax(records: bytes) -> bytes:
    return header("pax", len(records), b"x") + padded(records)


names = st.lists(st.text("abcé日.-_ ", min_size=1, max_size=90), min_size=1, max_size=3).map("/".join)


@given(
    members=st.dictionaries(names, st.binary(max_size=1100), max_size=4),
    style=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_standard_library_writes_is_read_alike(members: dict[str, bytes], style: int) -> None:
    plain = {n: d for n, d in members.items() if not {".", ".."} & set(n.split("/"))}
    tar = tar_of(plain, style=style)
    assert {m.name: tar[m.offset : m.offset + m.size] for m in listed(tar)} == plain


UNDERSTOOD = {
    "folders and a leading dot": (
        header("./", 0, b"5") + header("./sub/", 0, b"5") + header("./sub/a") + END,
        Member("sub/a", 3 * BLOCK, 0),
    ),
    "a size in base 256": (
        header("a", size_field=b"\x80" + (3).to_bytes(11, "big")) + padded(b"abc") + END,
        Member("a", BLOCK, 3),
    ),
    "a path and a size of pax": (
        pax(record("path=é") + record("size=3")) + header("other", 0) + padded(b"abc") + END,
        Member("é", 3 * BLOCK, 3),
    ),
    "a global comment of pax": (
        header("g", 13, b"g") + padded(record("comment=a")) + header("a") + END,
        Member("a", 3 * BLOCK, 0),
    ),
    "a prefix of ustar": (
        tar_of({LONG: b""}, style=tarfile.USTAR_FORMAT),
        Member(LONG, BLOCK, 0),
    ),
}


@pytest.mark.parametrize(("tar", "member"), UNDERSTOOD.values(), ids=UNDERSTOOD)
def test_what_other_programs_write_is_understood(tar: bytes, member: Member) -> None:
    assert listed(tar) == [member]


def test_a_changed_byte_in_any_header_is_an_error_and_never_another_listing() -> None:
    tar = tar_of(THREE)
    whole = listed(tar)
    for start in headers_in(tar):
        for at in range(start, start + BLOCK):
            for flip in (0x01, 0x10, 0xFF):
                damaged = bytearray(tar)
                damaged[at] ^= flip
                try:
                    assert listed(bytes(damaged)) == whole
                except SourceDamaged:
                    continue


def test_an_archive_cut_off_anywhere_is_an_error_or_has_lost_only_padding() -> None:
    tar = tar_of(THREE)
    needed = len(padded(tar.rstrip(b"\0"))) + len(END)
    for end in range(0, len(tar), 256):
        if end < needed:
            with pytest.raises(SourceDamaged):
                listed(tar[:end])
        else:
            assert listed(tar[:end]) == listed(tar)
    with pytest.raises(SourceDamaged, match="cut off"):  # since it was opened
        list(walk(lambda length, offset: tar[offset : 3 * BLOCK][:length], archive="x.tar", end=len(tar)))


def without_magic() -> bytes:
    block = bytearray(tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT))
    block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def gnu_sparse() -> bytes:
    info = tarfile.TarInfo("bomb")
    info.type = tarfile.GNUTYPE_SPARSE
    return info.tobuf(tarfile.GNU_FORMAT)


NAMES = [
    "/etc/passwd",
    "../a",
    "a/../b",
    "a//b",
    "a/.",
    "..",
    "a\\b",
    "./",
    "C:\\a",
    b"a\0b",
    b"\xff\xfe",
    "",
]
FOLDERS = ["/", "/etc/", "../", "a/../b/"]
SIZES = [
    b"\x80" + (1 << 60).to_bytes(11, "big"),
    b"\x80" + bytes([255]) * 11,
    b"\xff" * 11 + b"\xfe",
    *(b"77777777777\0", b"-0000000001\0", b"0000_000001\0", b"           \0"),
]
RECORDS = [
    *(b"garbage", b"99 path=a\n", b"9 path=aa\n", b"0 path=a\n"),
    record("path=b") + record("path=c"),
    *map(record, ("no value", "path=a\0", "path=", "path=../a", "size=-1", "size=99999999999999999999")),
    record("size=1152921504606846976"),
]
LONG_NAME = header("L", 2, b"L") + padded(b"a\0")
HUGE = MAX_EXTENSION_BYTES + 1
HOSTILE: list[tuple[bytes, str]] = [
    *((header(name) + END, "name") for name in NAMES),
    *((header(name, 0, b"5") + END, "name") for name in FOLDERS),
    *((header("a", size_field=size) + END, "at byte 0") for size in SIZES),
    *((pax(records) + header("a") + END, "at byte") for records in RECORDS),
    *(
        (header("a") + header("b", 0, kind) + END, r"at byte 512, member 'b': it is")
        for kind in (b"1", b"2", b"3", b"4", b"6", b"7", b"K", b"S", b"V", b"M", b"A")
    ),
    *((header("a") + end, "end mark") for end in (b"", bytes(BLOCK), bytes(BLOCK + 511))),
    (header("a") + bytes(BLOCK) + header("b") + END, "data after a block"),
    (header("a") + END + bytes(2 << 20) + b"x", "data after a block"),
    (
        pax(record("GNU.sparse.major=1") + record("GNU.sparse.realsize=8589934592")) + header("a") + END,
        "sparse",
    ),
    (gnu_sparse() + END, "sparse"),
    (header("g", 11, b"g") + padded(record("path=ab")) + header("a") + END, "global"),
    (LONG_NAME + END, "no member"),
    (LONG_NAME + LONG_NAME + header("b") + END, "or two"),
    (header("L", HUGE, b"L") + padded(b"a" * HUGE) + header("b") + END, "extended header"),
    (header("a") + header("./a") + END, r"member './a': its name occurs twice"),
    (without_magic() + END, "magic"),
]


@pytest.mark.parametrize(("tar", "match"), HOSTILE)
def test_a_damaged_or_hostile_archive_is_an_error(tar: bytes, match: str) -> None:
    with pytest.raises(SourceDamaged, match=match):
        listed(tar)
