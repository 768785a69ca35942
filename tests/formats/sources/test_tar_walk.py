import io
import tarfile

import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.tar import MAX_EXTENSION_BYTES, Member, walk
from support.source_builders import BLOCK, header, headers_in, tar_of

END = bytes(2 * BLOCK)
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


@pytest.mark.parametrize("style", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_listed_with_the_place_of_their_bytes(style: int) -> None:
    tar = tar_of(THREE, style=style)
    assert [m.name for m in listed(tar)] == list(THREE)
    assert {m.name: tar[m.offset : m.offset + m.size] for m in listed(tar)} == THREE


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


def test_folders_and_a_leading_dot_are_passed_over() -> None:
    tar = header("./", 0, b"5") + header("./sub/", 0, b"5") + header("./sub/a") + END
    assert listed(tar) == [Member("sub/a", 3 * BLOCK, 0)]


def test_the_prefix_of_ustar_belongs_to_the_name() -> None:
    name = "/".join(["folder"] * 20) + "/a.JPEG"
    assert [m.name for m in listed(tar_of({name: b""}, style=tarfile.USTAR_FORMAT))] == [name]


def test_a_size_in_base_256_is_understood() -> None:
    tar = header("a", size_field=b"\x80" + (3).to_bytes(11, "big")) + padded(b"abc") + END
    assert listed(tar) == [Member("a", BLOCK, 3)]


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


def test_a_shrunken_file_is_an_error() -> None:
    tar = tar_of(THREE)
    short = tar[: 3 * BLOCK]
    with pytest.raises(SourceDamaged, match="cut off"):
        list(walk(lambda length, offset: short[offset : offset + length], archive="x.tar", end=len(tar)))


def test_a_zero_block_in_the_middle_is_an_error() -> None:
    with pytest.raises(SourceDamaged, match="data after a block"):
        listed(header("a") + bytes(BLOCK) + header("b") + END)


def test_data_behind_the_end_mark_are_an_error() -> None:
    with pytest.raises(SourceDamaged, match="data after a block"):
        listed(header("a") + END + bytes(2 << 20) + b"x")


@pytest.mark.parametrize("end", [b"", bytes(BLOCK), bytes(BLOCK + 511)])
def test_half_an_end_mark_is_an_error(end: bytes) -> None:
    with pytest.raises(SourceDamaged, match="end mark"):
        listed(header("a") + end)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../a", "a/../b", "a//b", "a/.", "..", "a\\b", "./", "C:\\a", b"a\0b", b"\xff\xfe", ""],
)
def test_a_hostile_name_is_an_error(name: str | bytes) -> None:
    with pytest.raises(SourceDamaged, match="name"):
        listed(header(name) + END)


@pytest.mark.parametrize("folder", ["/", "/etc/", "../", "a/../b/"])
def test_a_hostile_folder_is_an_error(folder: str) -> None:
    with pytest.raises(SourceDamaged, match="name"):
        listed(header(folder, 0, b"5") + END)


@pytest.mark.parametrize("kind", [b"1", b"2", b"3", b"4", b"6", b"7", b"K", b"S", b"V", b"M", b"A"])
def test_a_member_that_is_no_plain_file_is_an_error(kind: bytes) -> None:
    with pytest.raises(SourceDamaged, match=r"at byte 512, member 'b': it is"):
        listed(header("a") + header("b", 0, kind) + END)


@pytest.mark.parametrize(
    "size_field",
    [
        b"\x80" + (1 << 60).to_bytes(11, "big"),
        b"\x80" + bytes([255]) * 11,
        b"\xff" * 11 + b"\xfe",
        b"77777777777\0",
        b"-0000000001\0",
        b"0000_000001\0",
        b"           \0",
    ],
)
def test_an_absurd_or_negative_size_is_an_error(size_field: bytes) -> None:
    with pytest.raises(SourceDamaged):
        listed(header("a", size_field=size_field) + END)


def test_a_sparse_bomb_is_an_error() -> None:
    records = record("GNU.sparse.major=1") + record("GNU.sparse.realsize=8589934592")
    with pytest.raises(SourceDamaged, match="sparse"):
        listed(pax(records) + header("a") + END)


def test_a_pax_header_gives_path_and_size() -> None:
    tar = pax(record("path=é") + record("size=3")) + header("other", 0) + padded(b"abc") + END
    assert listed(tar) == [Member("é", 3 * BLOCK, 3)]


@pytest.mark.parametrize(
    "records",
    [
        b"garbage",
        b"99 path=a\n",
        b"9 path=aa\n",
        b"0 path=a\n",
        record("no value"),
        record("path=a\0"),
        record("path=b") + record("path=c"),
        record("path="),
        record("path=../a"),
        record("size=-1"),
        record("size=99999999999999999999"),
        record("size=1152921504606846976"),
    ],
)
def test_a_damaged_or_hostile_pax_header_is_an_error(records: bytes) -> None:
    with pytest.raises(SourceDamaged):
        listed(pax(records) + header("a") + END)


def test_a_global_pax_header_may_comment_but_not_rename() -> None:
    comment, path = record("comment=a"), record("path=ab")
    assert listed(header("g", len(comment), b"g") + padded(comment) + header("a") + END)
    with pytest.raises(SourceDamaged, match="global"):
        listed(header("g", len(path), b"g") + padded(path) + header("a") + END)


def test_an_extended_header_must_be_followed_by_its_member() -> None:
    with pytest.raises(SourceDamaged, match="no member"):
        listed(header("L", 2, b"L") + padded(b"a\0") + END)


def test_two_names_for_one_member_are_an_error() -> None:
    long_name = header("L", 2, b"L") + padded(b"a\0")
    with pytest.raises(SourceDamaged, match="or two"):
        listed(long_name + long_name + header("b") + END)


def test_a_huge_extended_header_is_an_error() -> None:
    size = MAX_EXTENSION_BYTES + 1
    with pytest.raises(SourceDamaged, match="extended header"):
        listed(header("L", size, b"L") + padded(b"a" * size) + header("b") + END)


def test_a_repeated_name_is_an_error() -> None:
    with pytest.raises(SourceDamaged, match=r"member './a': its name occurs twice"):
        listed(header("a") + header("./a") + END)


def test_an_old_tar_without_magic_is_an_error() -> None:
    block = bytearray(tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT))
    block[257:265] = bytes(8)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    with pytest.raises(SourceDamaged, match="magic"):
        listed(bytes(block) + END)


def test_what_gnu_tar_calls_sparse_is_refused_as_the_standard_library_reads_it() -> None:
    info = tarfile.TarInfo("bomb")
    info.type = tarfile.GNUTYPE_SPARSE
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(info)
    with pytest.raises(SourceDamaged, match="sparse"):
        listed(file.getvalue())
