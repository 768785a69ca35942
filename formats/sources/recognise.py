"""The recognition of a source by its path."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardprep.formats.errors import LabelConflict, UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.runtime.files import naming
from shardprep.formats.sources.annotations import WANTED_FOR_CLASSES, WANTED_FOR_VAL
from shardprep.formats.sources.coco import coco_folder
from shardprep.formats.sources.converted import converted_dataset, held_out
from shardprep.formats.sources.folders import Tree, class_folders, extracted_tree, kaggle_tree
from shardprep.formats.sources.ilsvrc import official_tars, remote_tars, single_tar
from shardprep.formats.sources.ilsvrc_base import IlsvrcSource
from shardprep.formats.sources.lists import labelled_list
from shardprep.formats.sources.metadata import metadata_folder
from shardprep.formats.sources.pairs import paired_folders
from shardprep.formats.sources.parquet import ParquetRows, parquet
from shardprep.formats.sources.record_files import RecordSource
from shardprep.formats.sources.source import (
    SPLITS,
    Box,
    Entries,
    Listing,
    Source,
    SourceOptions,
    no_such_split,
)
from shardprep.formats.sources.tar import BLOCK
from shardprep.formats.sources.tensorpack import LAYOUT as TENSORPACK, tensorpack_lmdb
from shardprep.formats.sources.tfrecord import TfRecord, tfrecord
from shardprep.formats.sources.webdataset import WebDataset, webdataset
from shardprep.formats.storage.store import Location


def image_columns(path: Path, split: str | None, options: SourceOptions) -> Source | None:
    """Return the source of images with columns beside them, None for a folder without any.

    Raises UsageError for options of several such sources, and what the sources raise.
    """
    metadata = metadata_folder(path, split, options)
    found = [
        source
        for source in (
            coco_folder(path, split, options),
            paired_folders(path, split, options) if options.pairs else None,
            metadata,
        )
        if source is not None
    ]
    if len(found) > 1:
        kinds = " and ".join(source.description for source in found)
        raise UsageError(
            f"has columns of several kinds: {kinds}; convert one, and add the other with prep join", path=path
        )
    if not found:
        return None
    _refuse_options(found[0], options, takes_columns=found[0] is metadata)
    return found[0]


def _refuse_options(source: Source, options: SourceOptions, *, takes_columns: bool) -> None:
    refused = [name for name in options.for_lists if name == "root" or not takes_columns]
    if options.columns and not takes_columns:
        refused.append("columns")
    if refused:
        raise _refusal(refused, source)


RECORD_FILES: tuple[Callable[[Path, str | None, SourceOptions], RecordSource | None], ...] = (
    webdataset,
    tfrecord,
    parquet,
)
LAYOUTS_OF_RECORDS = (WebDataset.LAYOUT, TfRecord.LAYOUT, ParquetRows.LAYOUT, TENSORPACK)

_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
_UNKNOWN_SOURCE = (
    "is not a known source. Give one of: "
    "ILSVRC2012_img_train.tar, _img_val.tar or _img_test.tar, or a folder that holds them; "
    "a folder with train/<class>/, val/ or test/ in it, extracted or Kaggle's (ILSVRC/Data/CLS-LOC); "
    "a folder of class folders; images with metadata.csv or metadata.jsonl, folders of pairs, or COCO's "
    "annotations beside them; "
    "an LMDB of tensorpack's LMDBSerializer, or the folder that holds its data.mdb; "
    "a list of images with their labels (.txt, .csv, .tsv, .jsonl); "
    "tar shards of WebDataset, TFRecord files, or Parquet files with images, or a folder of them; "
    "a converted dataset, or a folder of its splits. "
    f"The labels of val come from {WANTED_FOR_VAL} beside it, or from val/<class>/"
)


def merged(sources: Sequence[IlsvrcSource]) -> Source:
    """Return a source with each split from the first source that has it."""
    members = {split: source for source in reversed(sources) for split in source.splits}
    if len(members) == len(sources[0].splits):
        return sources[0]
    return MixedSource({split: members[split] for split in SPLITS if split in members})


@dataclass(frozen=True)
class MixedSource(Source):
    """A source of several; ``members`` has the source of each split, and all have the same classes."""

    members: Mapping[str, IlsvrcSource]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.members)

    @property
    def description(self) -> str:
        parts = ", ".join(f"{split} of {member.layout}" for split, member in self.members.items())
        return f"{parts} ({self._labels().counted})"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(f for member in self.members.values() for f in member.folders))

    def survey(self, split: str) -> Listing:
        return self._member(split).survey(split)

    def known_by(self, split: str) -> Mapping[str, Any] | None:
        return self._member(split).known_by(split)

    def survey_of(self, split: str, entries: Entries) -> Listing:
        return self._member(split).survey_of(split, entries)

    def _member(self, split: str) -> IlsvrcSource:
        if split not in self.members:
            raise no_such_split(split, self.splits)
        self._labels()
        return self.members[split]

    def boxes(self, split: str) -> Iterator[Box] | None:
        return self.members[split].boxes(split)

    def _labels(self) -> LabelSpace:
        """Return the label space of all splits. Raises LabelConflict if it is not the same."""
        (first, one), *others = self.members.items()
        for split, other in others:
            if other.labels.digest != one.labels.digest:
                raise LabelConflict(
                    f"{first} ({one.layout}) has {len(one.labels)} classes, but {split} ({other.layout}) "
                    f"has {len(other.labels)} or different ones; put {WANTED_FOR_CLASSES} beside them, or "
                    "keep them in two folders",
                    path=one.beside[0],
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
    """Return the source at a path, which may be a link; a split that exists twice is taken from its tar.

    At a place in object storage or on a server only the official archives are one.

    Class folders without a split, an LMDB and a list are taken for ``split``, or for train. ``seed`` draws
    the images of a ``val_fraction``. Only folders and a first header are read. Raises UsageError if nothing
    is recognised, DataError and OSError.
    """
    options = options or SourceOptions()
    if split not in (None, *SPLITS):
        raise UsageError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    if isinstance(path, Location):
        source = _without_list_options(remote_tars(path, check_md5=check_md5), options)
        return source if options.val_fraction is None else held_out(source, options.val_fraction, seed)
    if not path.exists():
        raise UsageError("does not exist", path=path)
    if options.val_fraction is None:
        return _recognised(path.resolve(), split, check_md5, options)
    return held_out(_recognised(path.resolve(), "train", check_md5, options), options.val_fraction, seed)


def _recognised(path: Path, split: str | None, check_md5: bool, options: SourceOptions) -> Source:
    if path.is_dir() and (dataset := converted_dataset(path)):
        return _without_list_options(dataset, options)
    if path.is_dir() and (source := image_columns(path, split, options)):
        return _without_columns(source, replace(options, columns=(), pairs=(), coco=None))
    _refuse_compressed(path)
    if records := _of_records(path, split, options):
        return _without_list_options(records, _without_records(options))
    found = _of_folder(path, options, check_md5) if path.is_dir() else _of_file(path, check_md5)
    if not found and (lmdb := tensorpack_lmdb(path, split or "train", options)):
        return _without_list_options(lmdb, _without_records(options))
    if not found and path.is_dir() and (source := class_folders(path, split or "train", options)):
        found = [source]
    if not found and (listed := labelled_list(path, split, options)):
        return _without_columns(listed, options, taken=("columns",))
    if not found:
        raise UsageError(_UNKNOWN_SOURCE, path=path)
    return _without_list_options(merged(found), options)


def _refusal(options: Iterable[str], source: Source) -> UsageError:
    """Return the error for options, by name, that a source does not have."""
    names = {"columns": "--column", "pairs": "--pair"}
    given = [names.get(option, f"--{option.replace('_', '-')}") for option in options]
    advice = "; add columns later with prep join" if {*given} & {*names.values()} else ""
    return UsageError(f"{', '.join(given)}: not for {source.description}{advice}")


def _without_list_options(source: Source, options: SourceOptions) -> Source:
    """Return the source, which is no list. Raises UsageError if options of lists were given."""
    if options.for_lists:
        raise _refusal(options.for_lists, source)
    return _without_columns(source, options)


def _without_columns(source: Source, options: SourceOptions, taken: Sequence[str] = ()) -> Source:
    """Return the source. Raises UsageError if options of columns were given that it does not take."""
    if refused := [name for name in options.for_columns if name not in taken]:
        raise _refusal(refused, source)
    if options.image_column is not None:
        raise UsageError(
            "--image-column needs record files (WebDataset, TFRecord, Parquet, LMDB), but this is "
            f"{source.description}"
        )
    return source


def _without_records(options: SourceOptions) -> SourceOptions:
    """Return the options without those that files of records have."""
    return replace(options, image_column=None, label_column=None)


def _of_records(path: Path, split: str | None, options: SourceOptions) -> Source | None:
    """Return the source of files that hold many records each; None if there are none.

    What lies beside the official archives is none.
    """
    if path.is_dir() and official_tars(path):
        return None
    every = (each(path, split, options) for each in RECORD_FILES)
    found = [source for source in every if source is not None]
    if len(found) > 1:
        names = " and ".join(source.description for source in found)
        raise UsageError(f"holds {names}; give a folder or a file of one of them", path=path)
    return found[0] if found else None


def _of_folder(path: Path, options: SourceOptions, check_md5: bool) -> list[IlsvrcSource]:
    every = (
        official_tars(path, check_md5=check_md5),
        kaggle_tree(path, options, check_md5=check_md5),
        extracted_tree(path, options, check_md5=check_md5),
    )
    found: list[IlsvrcSource] = [source for source in every if source is not None]
    if len(found) == 1 and isinstance(found[0], Tree):
        found[0].refuse_others()
    return found


def _refuse_compressed(path: Path) -> None:
    if _first_block(path).startswith((_GZIP, _ZIP)):
        raise UsageError("is compressed, but images are read in place; unpack it first", path=path)


def _of_file(path: Path, check_md5: bool) -> list[IlsvrcSource]:
    source = single_tar(path, check_md5=check_md5) if b"ustar" in _first_block(path) else None
    return [source] if source else []


def _first_block(path: Path) -> bytes:
    if not path.is_file():
        return b""
    with naming(path), path.open("rb") as file:
        return file.read(BLOCK)
