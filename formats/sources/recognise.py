"""Recognition of the kind of source at a path, or of a converted dataset; a val split held out of train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.records.record import LabelSpace, permutation
from shardprep.formats.runtime.files import name_in_os_errors
from shardprep.formats.runtime.progress import NoProgress, Progress
from shardprep.formats.runtime.work_folder import flag_of
from shardprep.formats.shards.dataset import SPLITS, Dataset, is_collection, open_with_root, splits_of
from shardprep.formats.shards.manifest import Manifest, check_column, read_box_rows, read_index, read_manifest
from shardprep.formats.shards.read import MANIFEST_NAME, Rows
from shardprep.formats.sources.coco import recognise_coco
from shardprep.formats.sources.ilsvrc import (
    find_archives,
    find_remote_tars,
    recognise_class_folders,
    recognise_official,
    recognise_tar,
)
from shardprep.formats.sources.lists import recognise_list, recognise_metadata
from shardprep.formats.sources.pairs import recognise_pairs
from shardprep.formats.sources.parquet import recognise_parquet
from shardprep.formats.sources.source import (
    Archive,
    Entries,
    Listing,
    ResourceReader,
    Source,
    SourceOptions,
    boxes_by_key,
    entry_dtype,
)
from shardprep.formats.sources.tar import BLOCK
from shardprep.formats.sources.tensorpack import recognise_tensorpack
from shardprep.formats.sources.tfrecord import recognise_tfrecord
from shardprep.formats.sources.webdataset import recognise_webdataset
from shardprep.formats.storage.store import Location

_CUSTODY = ("root", "content_root", "partial", "skipped", "plan", "source")  # kept of the original manifest


def recognise_dataset(path: Path) -> ConvertedDataset | None:
    """Return the source of a dataset or a folder of its splits, else None. Raises UsageError, DataError."""
    # a collection is refused when it is read
    is_single = (path / MANIFEST_NAME).is_file() or is_collection(path)
    folders = {"": path} if is_single else splits_of(path)
    manifests = [(folder, read_manifest(folder)) for folder in folders.values()]
    by_split = {manifest.split: (folder, manifest) for folder, manifest in manifests}
    return ConvertedDataset(by_split) if by_split else None


@dataclass(frozen=True)
class ConvertedDataset(Source):
    """A converted dataset; ``by_split`` has the folder and manifest of each split."""

    LAYOUT = "dataset"

    by_split: Mapping[str, tuple[Path, Manifest]]

    @property
    def description(self) -> str:
        manifests = [manifest for _, manifest in self.by_split.values()]
        counts = (f"{manifest.split} of {manifest.records:,}" for manifest in manifests)
        things = "images" if all(manifest.has_images for manifest in manifests) else "records"
        names = ", ".join(dict.fromkeys(name for manifest in manifests for name in manifest.schema.names))
        return f"converted shards: {', '.join(counts)} {things}{names and f', with columns {names}'}"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(folder.resolve() for folder, _ in self.by_split.values())

    def list_split(self, split: str, known_entries: Entries | None) -> Listing:
        folder, manifest = self.by_split[split]
        index = read_index(folder, manifest)
        entries = np.zeros(len(index), entry_dtype(index.dtype["key"].itemsize, 1))
        for column in ("key", "label", "length"):
            entries[column] = index[column]
        entries["offset"] = np.arange(len(index))
        for each in manifest.column_entries:
            lengths = check_column(folder, manifest, each)
            entries["length"] += each.field.codec.size or 0 if lengths is None else lengths["length"]
        return Listing(
            split,
            self.LAYOUT,
            entries,
            manifest.labels,
            RecordReader(folder, manifest.root),
            archives=tuple(Archive(shard.name, shard.size, 0) for shard in manifest.shards),
            options={"dataset": {name: getattr(manifest, name) for name in _CUSTODY}},
            schema=manifest.schema,
            has_images=manifest.has_images,
        )

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        folder, manifest = self.by_split[split]
        rows = read_box_rows(folder, manifest)
        return None if rows is None else boxes_by_key(rows, read_index(folder, manifest)["key"], labels)


@dataclass
class RecordReader(ResourceReader[Dataset]):
    """Reader of a dataset's checked images and columns; an entry's offset is its record number."""

    folder: Path
    root: str

    def open_resource(self) -> AbstractContextManager[Dataset]:
        return closing(open_with_root(self.folder, self.root))

    def read(self, entry: np.void) -> bytes:
        return self.resource[int(entry["offset"])].image

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        dataset, number = self.resource, int(entry["offset"])
        return tuple(dataset.columns.data(name, dataset.place(number)) for name in dataset.schema.names)

    def location_of(self, entry: np.void) -> str:
        return f"{self.folder}, record {int(entry['offset'])}"


_OTHER_STREAM = 1 << 64  # unlike for the stored order, which uses the seed alone


@dataclass(frozen=True)
class HeldOutVal(Source):
    """The images of a source with only train, divided into train and val.

    val gets ``fraction`` of each class, rounded up or down so that this is also its fraction of all images;
    at least one image of each class stays in train. The choice depends on ``seed`` and the images' keys, not
    on the order of the listing. Raises UsageError for a source with other splits.
    """

    source: Source
    fraction: float
    seed: int

    def __post_init__(self) -> None:
        if self.source.splits != ("train",):
            raise UsageError(
                f"a val fraction needs a source with only train, and this one has "
                f"{', '.join(self.source.splits)}; leave out --val-fraction, or give the folder of train"
            )

    @property
    def splits(self) -> tuple[str, ...]:
        return ("train", "val")

    @property
    def description(self) -> str:
        return f"{self.source.description}, {self.fraction:g} of it for val"

    @property
    def folders(self) -> tuple[Path, ...]:
        return self.source.folders

    def list_split(self, split: str, known_entries: Entries | None) -> Listing:
        whole = self._whole
        entries = whole.entries[self._is_val == (split == "val")]
        missing = 0 if whole.expected is None else whole.expected - len(whole.entries)
        return replace(
            whole,
            split=split,
            entries=entries,
            expected=len(entries) + missing if missing else None,
            ignored=whole.ignored if split == "train" else {},
            options={**whole.options, "val_fraction": self.fraction},
            cache_key=None,
        )

    def boxes(self, split: str, labels: LabelSpace) -> Rows | None:
        return self.source.boxes("train", labels)

    @cached_property
    def _whole(self) -> Listing:
        return self.source.survey("train")

    @cached_property
    def _is_val(self) -> npt.NDArray[np.bool_]:
        """Whether each entry is drawn: every (1 / fraction)th, class after class."""
        entries = self._whole.entries
        by_key = np.argsort(entries["key"], kind="stable")
        mixed = by_key[permutation(len(entries), self.seed | _OTHER_STREAM)]
        by_class = mixed[np.argsort(entries["label"][mixed], kind="stable")]
        labels = entries["label"][by_class]
        chosen = np.diff(np.floor(np.arange(len(entries) + 1) * self.fraction + 0.5)) > 0
        chosen[:-1] &= labels[1:] == labels[:-1]
        chosen[-1:] = False
        is_val = np.zeros(len(entries), np.bool_)
        is_val[by_class[chosen]] = True
        return is_val


VALUE_EXTENSIONS = ("bin", "cls", "index", "json", "npy", "txt")  # extensions of a tar's members
_COMMON_OPTIONS = ("follow_symlinks", "skip_non_images", "val_fraction")  # options for every source
_GZIP, _ZIP = b"\x1f\x8b", b"PK\x03\x04"
_OTHER_TAR = (
    "is not a tar of ILSVRC12 or WebDataset; unpack it, and give its folder; or add --image-column jpg (or the like) "
    "to take all images without labels"
)
_UNKNOWN_SOURCE = (
    "is not a known source. Give the official archives (ILSVRC2012_img_train.tar, …), or folders train, val and "
    "test; class folders; images with metadata.csv, folders of masks (--pair) or COCO's annotations; a list of "
    "paths and labels (.txt, .csv, .tsv, .jsonl); tars of WebDataset (uncompressed, the files of a sample side "
    "by side), TFRecord or Parquet files, or tensorpack's LMDB; or converted shards. Save anything else with "
    "write_dataset, in Python"
)


def recognise(
    path: Path | Location,
    *,
    split: str | None = None,
    check_md5: bool = False,
    options: SourceOptions | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Source:
    """Return the source at a path, which may be a link; of a split that exists twice, the tar is used.

    In object storage and on servers, only the official archives are recognised. Sources without named splits
    are ``split``, or train. ``seed`` draws the images of a ``val_fraction``. Reads only folders and a first
    header. Raises UsageError if nothing is recognised, DataError, OSError.
    """
    options = options or SourceOptions()
    if split not in (None, *SPLITS):
        raise UsageError(f"the split must be one of {', '.join(SPLITS)}, not {split!r}")
    named_split = split if options.val_fraction is None else "train"
    if isinstance(path, Location):
        source: Source = find_remote_tars(path, check_md5=check_md5)
    elif path.exists():
        target = path.resolve()
        if path.is_file() and path.suffix != target.suffix:  # a link to a blob, whose name says nothing
            target = path.absolute()
        source = _recognise(target, named_split, check_md5, options)
    else:
        raise UsageError("does not exist; give an archive, a list or a folder of images", path=path)
    _refuse_other_options(options, source)
    if check_md5 and not getattr(source, "check_md5", False):
        raise UsageError(f"--check-md5: only for official archives, not for {source.description}")
    object.__setattr__(source, "progress", progress or NoProgress())  # sources are frozen
    return source if options.val_fraction is None else HeldOutVal(source, options.val_fraction, seed)


def _recognise(path: Path, split: str | None, check_md5: bool, options: SourceOptions) -> Source:
    arguments, is_folder = (path, split, options), path.is_dir()
    if is_folder:
        if converted := recognise_dataset(path):
            return converted
        if (path / "dataset_dict.json").is_file() or any(path.glob("data-*-of-*.arrow")):
            raise UsageError("was saved by datasets' save_to_disk; write it with to_parquet", path=path)
        metadata, coco = recognise_metadata(*arguments), recognise_coco(*arguments)
        paired = recognise_pairs(*arguments) if options.pairs else None
        used = [place for source in (coco, paired) if source for place in source.folders]
        for folder in (each for place in used for each in (place, place.parent) if path in each.parents):
            with suppress(UsageError):  # of a table of something else
                if (table := recognise_metadata(folder, split, options)) and table.splits:
                    metadata = table
        several = "has columns of several kinds: {}; convert one, and add the other with prep join"
        if source := _single_source((coco, paired, metadata), several, path):
            return source
    block = b""
    if path.is_file():
        with name_in_os_errors(path), path.open("rb") as file:
            block = file.read(BLOCK)
    if block.startswith((_GZIP, _ZIP)):
        raise UsageError("is compressed, but images are read in place; unpack it first", path=path)
    if not is_folder or not find_archives(path):  # files beside official tars are not sources
        tars, examples = recognise_webdataset(*arguments), recognise_tfrecord(*arguments)
        beside = tars or examples
        rows = recognise_parquet(*arguments, beside=beside.files if beside else None)
        if source := _single_source(
            (tars, examples, rows), "holds {}; give a folder or a file of one of them", path
        ):
            return source
    defaulted = path, split or "train", options
    if is_folder:
        source = recognise_official(path, options, check_md5=check_md5)
        source = source or recognise_tensorpack(*defaulted) or recognise_class_folders(*defaulted)
    else:
        is_tar = b"ustar" in block and b"\0" in block  # a list may have a class mustard
        tar = recognise_tar(path, check_md5=check_md5) if is_tar else None
        source = tar or recognise_tensorpack(*defaulted) or recognise_list(*arguments)
    if source := source or recognise_webdataset(*arguments, single=VALUE_EXTENSIONS):
        return source
    if is_folder and not any(path.iterdir()):
        raise UsageError("is an empty folder", path=path)
    raise UsageError(_OTHER_TAR if not is_folder and is_tar else _UNKNOWN_SOURCE, path=path)


def _refuse_other_options(options: SourceOptions, source: Source) -> None:
    used = options.kept(*(each.name for each in fields(options)))
    refused = [name for name in used if name not in (*_COMMON_OPTIONS, *source.OPTIONS)]
    if refused:
        advice = "; add columns later with prep join" if {*refused} & {"columns", "pairs"} else ""
        raise UsageError(f"{', '.join(map(flag_of, refused))}: not for {source.description}{advice}")


def _single_source(sources: Iterable[Source | None], several: str, path: Path) -> Source | None:
    """Return the only source, None if there is none. Raises UsageError with the message for several."""
    recognised = [source for source in sources if source is not None]
    if len(recognised) > 1:
        raise UsageError(several.format(" and ".join(source.description for source in recognised)), path=path)
    return recognised[0] if recognised else None
