"""Which kind of source a path is."""

from __future__ import annotations

from pathlib import Path

from .archive_file import naming
from .errors import UsageError
from .evidence import WANTED_FOR_VAL
from .mixed_source import merged
from .official_tars import official_tars, single_tar
from .recognised_source import RecognisedSource
from .source import SPLITS, Source
from .tar_header import BLOCK
from .tensorpack_source import tensorpack_lmdb
from .trees import class_folders, extracted_tree, kaggle_tree

_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
_LOOKED_FOR = f"""\
is no source that is known here. Give one of:
  ILSVRC2012_img_train.tar, _img_val.tar or _img_test.tar, or a folder that holds them;
  a folder with train/<class>/, val/ or test/ in it, extracted or Kaggle's (ILSVRC/Data/CLS-LOC);
  a folder of class folders;
  an LMDB of tensorpack's LMDBSerializer, or the folder that holds its data.mdb.
The labels of val come from {WANTED_FOR_VAL} beside it, or from val/<class>/"""


def recognise(path: Path, *, split: str | None = None, check_md5: bool = False) -> Source:
    """The source at a path, which may be a link; a split that is there twice is taken from its tar.

    Folders of classes alone, and an LMDB, are taken for ``split``, or for train. Nothing but folders and a
    first header is read. Raises UsageError where nothing is recognised, else DataError and OSError.
    """
    if split not in (None, *SPLITS):
        raise UsageError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    if not path.exists():
        raise UsageError("does not exist", path=path)
    path = path.resolve()
    found = _of_folder(path, check_md5) if path.is_dir() else _of_file(path, check_md5)
    if not found and (lmdb := tensorpack_lmdb(path, split or "train")):
        return lmdb
    if not found and path.is_dir() and (source := class_folders(path, split or "train")):
        found = [source]
    if not found:
        raise UsageError(_LOOKED_FOR, path=path)
    return merged(found)


def _of_folder(path: Path, check_md5: bool) -> list[RecognisedSource]:
    every = (
        official_tars(path, check_md5=check_md5),
        kaggle_tree(path, check_md5=check_md5),
        extracted_tree(path, check_md5=check_md5),
    )
    return [source for source in every if source is not None]


def _of_file(path: Path, check_md5: bool) -> list[RecognisedSource]:
    head = _first_block(path)
    if head.startswith((_GZIP, _ZIP)):
        raise UsageError("is compressed, and images are read in place; unpack it first", path=path)
    source = single_tar(path, check_md5=check_md5) if b"ustar" in head else None
    return [source] if source else []


def _first_block(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with naming(path), path.open("rb") as file:
        return file.read(BLOCK)
