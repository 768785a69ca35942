"""Mutated files: bytes changed at random, values made extreme, and checksums corrected."""

import copy
import struct
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

BLOCK = 512
PNG_HEAD = 8
ANCILLARY = b"tEXt zTXt iTXt eXIf iCCP tRNS PLTE bKGD acTL fcTL fdAT".split()
INTEGERS = [0, 1, 2, 7, 127, 128, 255, 256, 4095, 65535, 65536, -1, -2, 1 << 62]
INTEGERS += [(1 << bits) - less for bits in (31, 32, 63, 64) for less in (0, 1)]


def place_in(data: bytearray, rng: Random) -> int:
    """A random position; half of the time near an end, where headers and tables are."""
    size = len(data)
    near = [rng.randrange(min(size, 512)), max(0, size - 1 - rng.randrange(min(size, 512)))]
    return rng.choice([rng.randrange(size), rng.randrange(size), *near])


def flip(data: bytearray, rng: Random) -> None:
    data[place_in(data, rng)] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: Random) -> None:
    at = place_in(data, rng)
    new = rng.choice([rng.randbytes(rng.randint(1, 16)), bytes(8), b"\xff" * 8])
    data[at : at + len(new)] = new


def write_integer(data: bytearray, rng: Random) -> None:
    width, at = rng.choice([1, 2, 4, 8]), place_in(data, rng)
    value = rng.choice(INTEGERS) % (1 << 8 * width)
    data[at : at + width] = value.to_bytes(width, rng.choice(["little", "big"]))


def write_digits(data: bytearray, rng: Random) -> None:
    """Replace a run of decimal digits by another one."""
    at = place_in(data, rng)
    while at < len(data) and not 48 <= data[at] <= 57:
        at += 1
    end = at
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    data[at:end] = rng.choice(
        [b"", b"0", b"-1", b"9" * 30, b"1e999", b"nan", b"9" * 5000, b"00000000000000000001"]
    )


def cut(data: bytearray, rng: Random) -> None:
    del data[place_in(data, rng) :]


def delete(data: bytearray, rng: Random) -> None:
    at = place_in(data, rng)
    del data[at : at + rng.choice([1, 2, 4, 8, 100, BLOCK])]


def insert(data: bytearray, rng: Random) -> None:
    source = place_in(data, rng)
    piece = rng.choice(
        [bytes(data[source : source + rng.choice([1, 8, 100, BLOCK, 5000])]), rng.randbytes(8)]
    )
    at = place_in(data, rng)
    data[at:at] = piece


def swap(data: bytearray, rng: Random) -> None:
    size = rng.choice([4, 16, BLOCK, 4096])
    one, other = (place_in(data, rng) // size * size for _ in range(2))
    first, second = bytes(data[one : one + size]), bytes(data[other : other + size])
    data[one : one + size], data[other : other + size] = second, first


def repeat(data: bytearray, rng: Random) -> None:
    at = place_in(data, rng)
    data[at:at] = bytes(data[at : at + rng.choice([1, 4, 12, 64])]) * rng.choice([10, 1000])


CHANGES: list[Callable[[bytearray, Random], None]] = [
    *(flip, flip, overwrite, overwrite, write_integer, write_integer, write_integer),
    *(write_digits, cut, delete, insert, swap, repeat),
]


def mutated(data: bytes, rng: Random, tokens: Sequence[bytes] = ()) -> bytes:
    """Make one to four changes, half of them with ``tokens`` of the format, if there are any."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if tokens and rng.random() < 0.5:
            at, token = place_in(changed, rng) if changed else 0, rng.choice(tokens)
            at -= at % rng.choice([1, 8])  # as many formats align their data
            changed[at : at + rng.choice([0, len(token)])] = token
        elif changed:
            rng.choice(CHANGES)(changed, rng)
    return bytes(changed)


def mutated_png(image: bytes, rng: Random) -> bytes:
    """Change, cut, drop, repeat or move one to three chunks; lengths and CRCs are correct."""
    chunks, at = [], PNG_HEAD
    while at < len(image):
        stop = at + 12 + int.from_bytes(image[at : at + 4], "big")
        chunks.append((image[at + 4 : at + 8], image[at + 8 : stop - 4]))
        at = stop
    for _ in range(rng.choice([1, 1, 2, 3])):
        at = rng.randrange(len(chunks))
        kind, data = chunks[at]
        match rng.randrange(7):
            case 0:
                chunks[at] = (kind, mutated(data, rng))
            case 1:
                chunks[at] = (kind, data[: rng.randrange(6)])
            case 2 if len(chunks) > 1:
                del chunks[at]
            case 3:
                chunks.insert(rng.randrange(len(chunks)), (kind, data))
            case 4:
                chunks.insert(rng.randrange(len(chunks)), chunks.pop(at))
            case 5:
                chunks[at] = (rng.choice(chunks)[0], data)
            case _:
                chunks.insert(at, (rng.choice(ANCILLARY), rng.choice([b"", rng.randbytes(9), b"a\0" + data])))
    parts = (struct.pack(">I", len(data)) + kind + data + bytes(4) for kind, data in chunks)
    return with_png_sums(image[:PNG_HEAD] + b"".join(parts))


def with_png_sums(image: bytes) -> bytes:
    """Correct the CRC of each chunk, of the length that it declares."""
    data, at = bytearray(image), PNG_HEAD
    while at + 12 <= len(data):
        stop = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if stop > len(data):
            break
        data[stop - 4 : stop] = struct.pack(">I", zlib.crc32(data[at + 4 : stop - 4]))
        at = stop
    return bytes(data)


def with_tar_sums(tar: bytes) -> bytes:
    """Correct the checksum of each block with a tar's magic."""
    data = bytearray(tar)
    for at in range(0, len(data) - BLOCK + 1, BLOCK):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % (sum(data[at : at + BLOCK]) % (1 << 18))
    return bytes(data)


LEAVES = [*INTEGERS, None, True, [], {}, [[]] * 3, {"a": 1}, 1.5, 1e308, -0.0, "lmdb", "hdf5", "train"]
LEAVES += ["", "x" * 3000, "\x1b[2J\n", "../..", "sha256:" + "0" * 64, "\udcff"]


def change_json(value: Any, rng: Random) -> None:
    """Replace, remove, repeat, move or add one to three parts of a JSON object."""
    for _ in range(rng.choice([1, 1, 1, 3])):
        _change_part(value, rng)


def _change_part(value: Any, rng: Random) -> None:
    parent, name = value, None
    while isinstance(parent, dict | list) and parent:
        name = rng.choice(list(parent) if isinstance(parent, dict) else list(range(len(parent))))
        if not isinstance(parent[name], dict | list) or not parent[name] or rng.random() < 0.2:
            break
        parent = parent[name]
    if name is None or not parent:
        return
    match rng.randrange(6):
        case 0:
            del parent[name]
        case 1 if isinstance(parent, dict):
            parent["more"] = copy.deepcopy(parent[name])
        case 1:
            parent.insert(0, copy.deepcopy(parent[name]))
        case 2:
            parent[name] = copy.deepcopy(
                parent[rng.choice(list(parent) if isinstance(parent, dict) else [0])]
            )
        case _:
            parent[name] = copy.deepcopy(rng.choice(LEAVES))
