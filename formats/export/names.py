"""Names of files from keys and classes: safe, unique, and with the key still in them.

What is not safe stands as in a URL, ``%2E`` for a dot; ``urllib.parse.unquote`` gives it back.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from blake3 import blake3

SUFFIXES = {
    "JPEG": ("jpg", "jpeg", "jpe", "jfif"),
    "PNG": ("png",),
    "WebP": ("webp",),
    "TIFF": ("tif", "tiff"),
    "BMP": ("bmp", "dib"),
    "GIF": ("gif",),
    "JPEG 2000": ("jp2", "j2k", "jpf", "jpx", "j2c"),
    "Netpbm": ("ppm", "pgm", "pbm", "pnm", "pam", "pfm"),
    "AVIF": ("avif",),
    "Sun raster": ("ras", "sr"),
}
"""The suffixes of each kind of image; the first is the one that is written."""
ALL_SUFFIXES = frozenset(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)

_SPLITS = re.compile(r"(?<!^)(?<!/)/(?!$)")  # other slashes would make empty names
_UNSAFE = re.compile(r'[%/\\:*?"<>|\x00-\x1f\x7f]|^\.|[. ]$')
_CASED = re.compile(r"[^a-z0-9_~ -]")


def parts_of(key: str) -> list[str]:
    """Return the parts of a key between single slashes within it; they have at least one character each."""
    return _SPLITS.split(key)


def stem_of(key: str) -> str:
    """Return the key as a stem of WebDataset: ASCII, with no dot.

    >>> stem_of("a/b.c"), stem_of("../x y")
    ('a/b%2Ec', '%2E%2E/x%20y')
    """
    return "/".join(quote(part, safe="").replace(".", "%2E") for part in parts_of(key))


def without_suffix(key: str) -> str:
    """Return the key without the suffix of an image file.

    >>> without_suffix("a/b.JPEG"), without_suffix("a/b.c")
    ('a/b', 'a/b.c')
    """
    stem, _, suffix = key.rpartition(".")
    return stem if stem and not stem.endswith("/") and suffix.lower() in ALL_SUFFIXES else key


def file_part(part: str) -> str:
    """Return a part of a path as the name of a file: not hidden, and possible on any file system.

    >>> file_part(".."), file_part("what?")
    ('%2E%2E', 'what%3F')
    """
    return "%2E%2E" if part == ".." else _UNSAFE.sub(_quoted, part)


def folder_part(part: str) -> str:
    """Return a part of a path as the name of a folder, which never is the name of an image file."""
    stem, dot, suffix = file_part(part).rpartition(".")
    return f"{stem}%2E{suffix}" if dot and suffix.lower() in ALL_SUFFIXES else stem + dot + suffix


def caseless_part(part: str) -> str:
    """Return a name that differs from that of any other text on file systems that ignore case, too.

    >>> caseless_part("Cat.1"), caseless_part("cat.1")
    ('%43at%2E1', 'cat%2E1')
    """
    return _CASED.sub(_quoted, part)


def with_suffix(name: str, kind: str, suffix: str) -> str:
    """Return the name of an image file of that kind: with the suffix, unless it has one of the kind."""
    has_one = name.rpartition(".")[2].lower() in SUFFIXES[kind] and "." in name
    return name if has_one else f"{name}.{suffix}"


def suffix_of(kind: str, components: int) -> str:
    """Return the suffix of image files of that kind and number of channels."""
    return "pgm" if kind == "Netpbm" and components == 1 else SUFFIXES[kind][0]


def digests(names: Iterable[str]) -> npt.NDArray[np.uint64]:
    """Return a number of 64 bits for each name: equal for names that some file systems take for equal."""
    folded = (unicodedata.normalize("NFC", name.casefold()).encode() for name in names)
    return np.fromiter((int.from_bytes(blake3(name).digest(8), "little") for name in folded), np.uint64)


def repeated(numbers: npt.NDArray[np.uint64]) -> frozenset[int]:
    """Return the numbers that are there more than once."""
    found, counts = np.unique(numbers, return_counts=True)
    return frozenset(found[counts > 1].tolist())


def _quoted(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())
