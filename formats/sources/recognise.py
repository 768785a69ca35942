"""Recognition of the kind of source at a path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardprep.formats.errors import LabelConflict, UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.runtime.files import naming
from shardprep.formats.shards.read import Rows
from shardprep.formats.sources.annotations import WANTED_FOR_CLASSES
from shardprep.formats.sources.coco import coco_folder
from shardprep.formats.sources.converted import HeldOutVal, converted_dataset
from shardprep.formats.sources.ilsvrc import (
    IlsvrcSource,
    Tree,
    class_folders,
    kaggle_tree,
    official_tars,
    remote_tars,
    single_tar,
    tree,
)
from shardprep.formats.sources.lists import labelled_list, metadata_folder
from shardprep.formats.sources.pairs import paired_folders
from shardprep.formats.sources.parquet import ParquetRows, parquet
from shardprep.formats.sources.source import SPLITS, Entries, Listing, Source, SourceOptions
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


@dataclass(frozen=True)
class MixedSource(Source):
    """A combination of sources; ``of_split`` has the one of each split, all with the same classes."""

    of_split: Mapping[str, IlsvrcSource]

    @property
    def description(self) -> str:
        parts = ", ".join(f"{split} of {member.layout}" for split, member in self.of_split.items())
        return f"{parts} ({self._labels().counted})"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(f for member in self.of_split.values() for f in member.folders))

    def listed(self, split: str, known: Entries | None) -> Listing:
        self._labels()
        return self.of_split[split].listed(split, known)

    def known_by(self, split: str) -> Mapping[str, Any] | None:
        self._labels()
        return self.of_split[split].known_by(split)

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        return self.of_split[split].boxes(split, labels)

    def _labels(self) -> LabelSpace:
        """Return the label space of all splits. Raises LabelConflict if they differ."""
        (first, one), *others = self.of_split.items()
        for split, other in others:
            if other.labels.digest != one.labels.digest:
                raise LabelConflict(
                    f"{first} ({one.layout}) has {len(one.labels)} classes, but {split} ({other.layout}) "
                    f"has {len(other.labels)} or different ones; put {WANTED_FOR_CLASSES} beside them, or "
                    "keep them in two folders",
                    path=one.beside,
                )
        return one.labels


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
    if not is_folder or not official_tars(path):  # files beside official tars are not sources
        records = (webdataset(*given), tfrecord(*given), parquet(*given))
        if source := _only(records, "holds {}; give a folder or a file of one of them", path):
            return source
    if official := _official(path, options, check_md5):
        members = {split: each for each in reversed(official) for split in each.splits}
        if len(members) == len(official[0].splits):
            return official[0]
        return MixedSource({split: members[split] for split in SPLITS if split in members})
    source = tensorpack_lmdb(path, split or "train", options)
    if source is None and is_folder:
        source = class_folders(path, split or "train", options)
    if source := source or labelled_list(*given):
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


def _official(path: Path, options: SourceOptions, check_md5: bool) -> list[IlsvrcSource]:
    """Return the sources of ILSVRC12 or of split folders at a path."""
    if not path.is_dir():
        tar = single_tar(path, check_md5=check_md5) if b"ustar" in _first_block(path) else None
        return [tar] if tar else []
    every = (
        official_tars(path, check_md5=check_md5),
        kaggle_tree(path, options, check_md5=check_md5),
        tree("extracted-tree", path, path, options, check_md5),
    )
    found: list[IlsvrcSource] = [source for source in every if source is not None]
    if len(found) == 1 and isinstance(found[0], Tree):
        found[0].refuse_others()
    return found


def _first_block(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with naming(path), path.open("rb") as file:
        return file.read(BLOCK)
