"""Recognition of the kind of source at a path."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.files import naming
from shardprep.formats.sources.coco import coco_folder
from shardprep.formats.sources.converted import HeldOutVal, converted_dataset
from shardprep.formats.sources.ilsvrc import (
    archives_in,
    class_folders,
    official_source,
    remote_tars,
    single_tar,
)
from shardprep.formats.sources.lists import labelled_list, metadata_folder
from shardprep.formats.sources.pairs import paired_folders
from shardprep.formats.sources.parquet import ParquetRows, parquet
from shardprep.formats.sources.source import SPLITS, Source, SourceOptions
from shardprep.formats.sources.tar import BLOCK
from shardprep.formats.sources.tensorpack import TensorpackLmdb, tensorpack_lmdb
from shardprep.formats.sources.tfrecord import TfRecord, tfrecord
from shardprep.formats.sources.webdataset import WebDataset, webdataset
from shardprep.formats.storage.store import Location

LAYOUTS_OF_RECORDS = (WebDataset.LAYOUT, TfRecord.LAYOUT, ParquetRows.LAYOUT, TensorpackLmdb.LAYOUT)
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
_UNKNOWN_SOURCE = (
    "is not a known source. Give the official archives (ILSVRC2012_img_train.tar, …), or folders train, val and "
    "test; class folders; images with metadata.csv, folders of masks (--pair) or COCO's annotations; a list of "
    "paths and labels (.txt, .csv, .tsv, .jsonl); tars of WebDataset (uncompressed, the files of a sample side "
    "by side), TFRecord or Parquet files, or tensorpack's LMDB; or converted shards"
)


def recognise(
    path: Path | Location,
    *,
    split: str | None = None,
    check_md5: bool = False,
    options: SourceOptions | None = None,
    seed: int = 0,
) -> Source:
    """Return the source at a path, which may be a link; of a split that exists twice, the tar is used.

    In object storage and on servers, only the official archives are recognised. Sources without named splits
    are ``split``, or train. ``seed`` draws the images of a ``val_fraction``. Reads only folders and a first
    header. Raises UsageError if nothing is recognised, DataError, OSError.
    """
    options = options or SourceOptions()
    if split not in (None, *SPLITS):
        raise UsageError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    wanted = split if options.val_fraction is None else "train"
    if isinstance(path, Location):
        source: Source = remote_tars(path, check_md5=check_md5)
    elif path.exists():
        source = _recognised(path.resolve(), wanted, check_md5, options)
    else:
        raise UsageError("does not exist; give an archive, a list or a folder of images", path=path)
    _refuse_others(options, source)
    return source if options.val_fraction is None else HeldOutVal(source, options.val_fraction, seed)


def _recognised(path: Path, split: str | None, check_md5: bool, options: SourceOptions) -> Source:
    given, is_folder = (path, split, options), path.is_dir()
    if is_folder:
        if converted := converted_dataset(path):
            return converted
        metadata, coco = metadata_folder(*given), coco_folder(*given)
        paired = paired_folders(*given) if options.pairs else None
        several = "has columns of several kinds: {}; convert one, and add the other with prep join"
        if source := _only((coco, paired, metadata), several, path):
            return source
    if _first_block(path).startswith((_GZIP, _ZIP)):
        raise UsageError("is compressed, but images are read in place; unpack it first", path=path)
    if not is_folder or not archives_in(path):  # files beside official tars are not sources
        records = (webdataset(*given), tfrecord(*given), parquet(*given))
        if source := _only(records, "holds {}; give a folder or a file of one of them", path):
            return source
    one = path, split or "train", options
    if is_folder:
        source = (
            official_source(path, options, check_md5=check_md5)
            or tensorpack_lmdb(*one)
            or class_folders(*one)
        )
    else:
        tar = single_tar(path, check_md5=check_md5) if b"ustar" in _first_block(path) else None
        source = tar or tensorpack_lmdb(*one) or labelled_list(*given)
    if source:
        return source
    is_empty = is_folder and not any(path.iterdir())
    raise UsageError("is an empty folder" if is_empty else _UNKNOWN_SOURCE, path=path)


def _refuse_others(options: SourceOptions, source: Source) -> None:
    every = options.kept("root", "path_column", "label_column", "columns", "pairs", "coco", "image_column")
    refused = [name for name in every if name not in source.TAKES]
    if refused:
        names = {"columns": "--column", "pairs": "--pair"}
        flags = [names.get(name, f"--{name.replace('_', '-')}") for name in refused]
        advice = "; add columns later with prep join" if {*flags} & {*names.values()} else ""
        raise UsageError(f"{', '.join(flags)}: not for {source.description}{advice}")


def _only(sources: Iterable[Source | None], several: str, path: Path) -> Source | None:
    """Return the only source, None if there is none. Raises UsageError with the message for several."""
    found = [source for source in sources if source is not None]
    if len(found) > 1:
        raise UsageError(several.format(" and ".join(source.description for source in found)), path=path)
    return found[0] if found else None


def _first_block(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with naming(path), path.open("rb") as file:
        return file.read(BLOCK)
