"""Preparation of a conversion: listing and planning the splits, and checking the outputs."""

from __future__ import annotations

import errno
import hashlib
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.conversion.plan import Plan, PlanOptions, blocks, deal_shards, make_plan
from shardprep.formats.errors import (
    NoSpace,
    OutputBusy,
    PlanMismatch,
    ShardprepError,
    SourceIncomplete,
    UsageError,
)
from shardprep.formats.records.record import ITEM_ORDERS, LAYOUT, ORDERS
from shardprep.formats.runtime.files import LOCAL_FUSE, NETWORK_FILESYSTEMS, disk_room, filesystem_type
from shardprep.formats.runtime.jobs import Unit
from shardprep.formats.runtime.json_record import sha256_of
from shardprep.formats.runtime.progress import Progress, check_flags, check_int, count_of, format_size
from shardprep.formats.runtime.user_paths import redact, user_path
from shardprep.formats.runtime.work_folder import (
    WORK_FOLDER_NAME,
    WorkFolder,
    bytes_in_run_folders,
    describe_differences,
    refuse_busy,
    refuse_other_plan,
)
from shardprep.formats.shards.dataset import SPLITS, is_dataset, refuse_in_dataset
from shardprep.formats.shards.manifest import FORMAT_VERSION, Manifest, index_dtype, read_manifest
from shardprep.formats.shards.read import IN_PLACE, MANIFEST_NAME, Rows, container
from shardprep.formats.sources.listing import StoredEntries
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import Listing, Problems, Source, SourceOptions
from shardprep.formats.storage.store import SCHEMES, Location, path_or_place


def refuse_other_shape(output: Path, split: str | None) -> None:
    """Raise UsageError if ``output`` is a dataset instead of a folder of splits, or the other way round.

    It should be a folder of splits if ``split`` is None. Unfinished datasets count. A file is refused, too.
    """
    if os.path.lexists(output) and not output.is_dir():
        raise UsageError("is not a folder; choose another output", path=output)
    if split is None:
        if is_dataset(output):
            raise UsageError(
                "is itself a dataset, so splits cannot go into it; choose another output, or continue this one "
                "with the --split that began it",
                path=output,
            )
    elif inside := [name for name in SPLITS if is_dataset(output / name)]:
        raise UsageError(
            f"is a folder of splits ({', '.join(inside)}); give {str(output / split)!r} with --split {split}",
            path=output,
        )


def check_room(bytes_to_write: Mapping[Path, int], *, alone: bool = True) -> None:
    """Raise NoSpace unless these bytes fit into the output folders, which are on one file system.

    A run that works ``alone`` counts the leftovers of killed runs as free, because it removes them first.
    """
    if not bytes_to_write:
        return
    needed = sum(bytes_to_write.values())
    output = next(iter(bytes_to_write))
    _, free = disk_room(output)
    if alone:
        free += sum(bytes_in_run_folders(output / WORK_FOLDER_NAME) for output in bytes_to_write)
    if free < needed:
        raise NoSpace(
            f"needs {format_size(needed)} and the disk has {format_size(free)} free; make room, or choose another output",
            path=output,
        )


def refuse_network(output: Path, kind: str) -> None:
    """Raise UsageError for LMDB on a network file system, where its memory-mapped file is not coherent."""
    filesystem = filesystem_type(output)
    may_be_remote = filesystem.startswith("fuse.") and filesystem not in LOCAL_FUSE
    if kind == "lmdb" and (filesystem in NETWORK_FILESYSTEMS or may_be_remote):
        raise UsageError(
            f"is on a network file system ({filesystem}), where building LMDB is not safe; use --format hdf5, "
            "or convert to a local disk and copy, or add --allow-network-fs",
            path=output,
        )


def check_output(output: Path, source_folders: Iterable[Path] = (), *, work: str = "a conversion") -> None:
    """Raise UsageError for an output in the source or a dataset, or with anything but unfinished work in it.

    ``work`` names this work in the error. Raises OSError if the output is not writable.
    """
    nearest = next(path for path in (output, *output.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        raise UsageError("is not a folder; choose another output", path=nearest)
    if not os.access(nearest, os.W_OK | os.X_OK):
        number = errno.EROFS if os.statvfs(nearest).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(number, os.strerror(number), str(nearest))
    for folder in source_folders:
        if output.resolve().is_relative_to(folder):
            raise UsageError(
                "is inside the source, where the next run would find it; choose another output", path=output
            )
    refuse_in_dataset(output)
    # In this order: another part of the conversion may start in between, and makes its work folder first.
    if nearest == output and any(output.iterdir()) and not (output / WORK_FOLDER_NAME).exists():
        raise UsageError(f"is not empty, and is not {work} to continue; choose another output", path=output)


@contextmanager
def lock_dataset(path: Path, manifest: Manifest) -> Iterator[WorkFolder]:
    """Lock a finished dataset. Raises OutputBusy if another process has replaced its manifest."""
    with WorkFolder(path) as work_folder:
        if read_manifest(path).root != manifest.root:
            raise OutputBusy("was changed by another process in the meantime; try again", path=path)
        yield work_folder


MAX_NAMED = 5  # classes in one line
MAX_READ_AGAIN = 4  # how often an image may be read, before it is noted
PLAN_COLUMNS = ("key", "label", "length")  # columns of the entries covered by the plan's digest


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion that do not change the images, labels and columns of its output.

    Args:
        allow_partial: Whether to accept a wrong number of images.
        restart: Whether to discard unfinished work.
        check_md5: Whether to check the MD5 sums of official archives first, which reads them completely; the
            manifest stores the sums under its root.
        allow_network_fs: Whether to build LMDB even on a network file system.
    """

    allow_partial: bool = False
    restart: bool = False
    check_md5: bool = False
    allow_network_fs: bool = False

    def __post_init__(self) -> None:
        check_flags(**vars(self))


@dataclass(frozen=True)
class PreparedSplit:
    """A split planned for the folder ``output``; ``shards`` are those to build: all, or one part's."""

    output: Path
    plan: Plan
    boxes: Rows | None
    shards: Sequence[Unit]

    @property
    def listing(self) -> Listing:
        return self.plan.listing

    @property
    def is_finished(self) -> bool:
        return (self.output / MANIFEST_NAME).exists()

    @contextmanager
    def begin_work(self, *, shared: bool = False) -> Iterator[WorkFolder | None]:
        """Lock the output, and begin or resume work in the folder yielded; None if it is finished."""
        if not self.is_finished:
            with WorkFolder(self.output, shared=shared) as work_folder:
                if not self.is_finished:  # another run may have finished it since
                    work_folder.claim(self.guard())
                    yield work_folder
                    return
        yield None

    def max_bytes(self, shards: Iterable[Unit]) -> int:
        """Return an upper bound of the size of the tables and these shards."""
        tables = len(self.plan.order) * (index_dtype(self.plan.key_bytes).itemsize + 32)
        return tables + sum(map(container(self.plan.options.container).bytes_needed, shards))

    def bytes_to_write(self, shards: Iterable[Unit]) -> int:
        """Return an upper bound of the bytes still to write for these shards."""
        missing = (shard for shard in shards if not (self.output / shard.name).exists())
        return self.max_bytes(()) + self.max_bytes(missing)  # at the end, rows exist in both folders

    def check_output(self, folders: Iterable[Path], options: ConvertOptions, problems: Problems) -> None:
        """Add to ``problems`` why the split cannot be written; ``folders`` are the source's."""
        if self.is_finished:
            with problems.collect():
                self.read_finished_manifest()
            return
        with problems.collect():
            check_output(self.output, folders)
            if not options.restart:
                refuse_other_plan(self.output, self.guard())
        if not options.allow_network_fs:
            with problems.collect():
                refuse_network(self.output, self.plan.options.container)

    def read_finished_manifest(self) -> Manifest:
        """Return the finished output's manifest. Raises DataError; PlanMismatch if its plan differs."""
        manifest = read_manifest(self.output)
        self.refuse_other_conversion(manifest, self.output)
        return manifest

    def refuse_other_conversion(self, manifest: Manifest, place: str | os.PathLike[str]) -> None:
        """Raise PlanMismatch if the finished dataset at ``place`` was made with another plan.

        The policy for bad images matters only if images were skipped, the options of the source only if they
        lead to different images.
        """
        policy = self.plan.options.on_bad_image if manifest.skipped else manifest.plan["on_bad_image"]
        what, plan = "items" if self.listing.layout == LAYOUT else "images", self.plan
        if manifest.version != FORMAT_VERSION:
            plan = make_plan(self.listing, plan.options, version=manifest.version)
        before = {what if name == "sha256" else name: value for name, value in manifest.plan.items()}
        now = plan.options.to_json() | {"on_bad_image": policy, what: plan.digests.get(policy)}
        if what == "images" and before[what] != now[what]:
            before |= SourceOptions.of_manifest(manifest.source).kept()
            now |= self.listing.options
        if differing := describe_differences(before, now):
            raise PlanMismatch(
                f"holds a finished dataset: {differing}; choose another folder, or remove this one",
                path=place,
            )

    def guard(self) -> dict[str, Any]:
        """Return the values that must not change until the conversion is finished, by names for users."""
        plan, entries = self.plan, self.listing.entries
        times = hashlib.sha256()
        for rows in blocks(plan.order):
            for column in (name for name in entries.dtype.names or () if name not in PLAN_COLUMNS):
                times.update(entries[column][rows].tobytes())
        writer = {"shardprep": version("shardprep"), **container(plan.options.container).library()}
        source = [[archive.state for archive in self.listing.archives], times.hexdigest()]
        source_options = dict(self.listing.options)
        parts: dict[str, object] = {"source": source, "images": plan.work_digest}
        if self.listing.layout == LAYOUT:  # what describes the items is not a user's option
            source_options, parts = {}, {"items": sha256_of([source_options, *parts.values()])}
        options = plan.options.to_json() | source_options
        del options["on_bad_image"]  # it does not affect finished shards
        parts |= {
            "split": self.listing.split,
            "boxes": None if self.boxes is None else hashlib.sha256(self.boxes.tobytes()).hexdigest(),
            "writer": ", ".join(f"{name} {value}" for name, value in writer.items()),
        }
        return options | parts


class Conversion:
    """A conversion with the arguments of :func:`.convert.convert`; None options take their defaults.

    ``part`` is None for the whole conversion. ``kept_shards`` is the number of shards in the output at a
    time, None for all. Raises UsageError.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        output: str | os.PathLike[str],
        split: str | None,
        plan_options: PlanOptions | None,
        options: ConvertOptions | None,
        source_options: SourceOptions | None,
        *,
        part: tuple[int, int] | None = None,
        kept_shards: int | None = None,
    ) -> None:
        scheme, mark, _ = (url := str(output)).partition(":/")
        if mark and scheme in SCHEMES:
            raise UsageError("is a URL; use convert_to_url()", path=redact(url))
        self.path = path_or_place(source)
        self.output = user_path(output)
        self.split = split
        self.plan_options = plan_options or PlanOptions()
        self.options = options or ConvertOptions()
        self.source_options = source_options or SourceOptions()
        forms = {"plan_options": PlanOptions, "options": ConvertOptions, "source_options": SourceOptions}
        for name, form in forms.items():
            if not isinstance(value := getattr(self, name), form):
                raise UsageError(f"{name} must be a {form.__name__}, or None, not {value!r}")
        self.part = part
        self.kept_shards = kept_shards
        if part is not None:
            if not isinstance(part, tuple | list) or len(part) != 2:
                raise UsageError(f"a part is given as two numbers, such as (1, 3), not {part!r}")
            number, of = (check_int(one, "the number of a part", least=0) for one in part)
            self.part = number, of
            if not 1 <= number <= of:
                raise UsageError(f"parts are numbered from 1 to {of}; there is no part {number}")
        if part and isinstance(self.path, Location):
            raise UsageError("is a URL, which cannot be converted in parts", path=self.path.url)
        if self.plan_options.order in ITEM_ORDERS:
            raise UsageError(
                f"a conversion's order is one of {', '.join(ORDERS)}, not {self.plan_options.order}"
            )

    def recognise_source(self, progress: Progress) -> Source:
        """Recognise the source, and note its description. Raises UsageError, DataError, OSError."""
        source = recognise(
            self.path,
            split=self.split,
            check_md5=self.options.check_md5,
            options=self.source_options,
            seed=self.plan_options.seed,
            progress=progress,
        )
        progress.note(f"source: {source.description}; listing it")
        return source

    def outputs(self, source: Source) -> dict[str, Path]:
        if self.split:
            return {self.split: self.output}
        return {split: self.output / split for split in source.splits}

    def check_outputs(self, source: Source) -> None:
        """Raise UsageError for an output of the wrong shape, OutputBusy for one in use."""
        refuse_other_shape(self.output, self.split)
        for path in self.outputs(source).values():
            refuse_busy(path, shared=self.part is not None)

    def share_listing(self, source: Source, split: str, output: Path, progress: Progress) -> None:
        """Store the listing of an archive for all parts, unless another part has; wait while one does.

        With an MD5 check, each part reads the archive itself. Each part also lists folders itself, because
        there is no other way to know that they have not changed.
        """
        is_finished = (output / MANIFEST_NAME).exists()
        cache_key = None if is_finished or self.options.check_md5 else source.cache_key(split)
        if cache_key is None:
            return
        check_output(output, source.folders)
        if not self.options.allow_network_fs:
            refuse_network(output, self.plan_options.container)
        waits = partial(progress.note, f"another part is reading the headers of {split}; waiting for it")
        with WorkFolder(output, shared=True) as work_folder, work_folder.critical_section("listing", waits):
            stored = StoredEntries(work_folder.folder, cache_key)
            if stored.read() is None and not (listing := source.survey(split)).problems:
                stored.write(listing.entries, work_folder.run)

    def prepare(self, source: Source, problems: Problems, progress: Progress) -> list[PreparedSplit]:
        """Return the splits that can be planned, without writing anything.

        Adds the problems of each split and output to ``problems``, and prepares the others all the same.
        """
        outputs = self.outputs(source)
        listings, prepared = list[Listing](), []
        for split, output in outputs.items():
            with problems.collect():
                entries, folder = None, output / WORK_FOLDER_NAME
                if folder.is_dir() and not self.options.restart and (cache_key := source.cache_key(split)):
                    entries = StoredEntries(folder, cache_key).read()  # stored by a part
                listing = source.survey(split, entries)
                lacks = [listing.shortfall] if listing.shortfall and self.options.allow_partial else []
                names = ([*listing.labels.label_of], *(field.classes for field in listing.schema))
                doubts = name_notes(() if listings else names)  # all splits have the same classes
                listings.append(replace(listing, notes=(*listing.notes, *doubts, *lacks)))
        for own in dict.fromkeys(listing.problems for listing in listings):  # splits may share theirs
            problems.merge(own)
        for listing in listings:
            is_short = listing.is_partial and not (self.options.allow_partial and len(listing.entries))
            if is_short:
                of = "" if listing.expected is None else f", not {listing.expected:,}"
                detail = f" ({listing.shortfall})" if listing.shortfall else ""
                message = (
                    f"the split {listing.split} has {count_of(len(listing.entries), 'image')}{of}{detail}"
                )
                advice = "; add --allow-partial to convert these" if len(listing.entries) else ""
                problems.add(SourceIncomplete(message + advice))
            if not len(listing.entries) and (is_short or listing.problems):
                continue  # the problems say why there are no images
            with problems.collect():
                if self.plan_options.container == IN_PLACE and listing.reader.archive is None:
                    raise UsageError(
                        f"the images of {listing.split} are not in an official tar, so they cannot stay "
                        "in place; convert them with prep convert"
                    )
                boxes = source.boxes(listing.split, listing.labels)  # now, to raise errors before any work
                plan = make_plan(listing, self.plan_options)
                prepared.append(PreparedSplit(outputs[listing.split], plan, boxes, plan.shards))
        if self.part:
            dealt = deal_shards([each.plan for each in prepared], self.part)
            prepared = [replace(each, shards=share) for each, share in zip(prepared, dealt, strict=True)]
        else:
            _note_untrained(prepared, progress)
        _note_random_reads(prepared, progress)
        for each in prepared:
            each.check_output(source.folders, self.options, problems)
        with problems.collect():
            needed = {}
            for each in (split for split in prepared if not split.is_finished):
                count = len(each.shards) if self.kept_shards is None else self.kept_shards
                largest = nlargest(count, each.shards, key=lambda shard: shard.size)
                needed[each.output] = each.bytes_to_write(largest)
            if self.kept_shards is not None:  # one split after the other, each removed at its end
                needed = dict(nlargest(1, needed.items(), key=itemgetter(1)))
            check_room(needed, alone=self.part is None)
        return prepared


def _note_random_reads(prepared: Iterable[PreparedSplit], progress: Progress) -> None:
    """Note the bytes to read where shuffling multiplies them."""
    for split in prepared:
        listing, is_shuffled = split.listing, split.plan.options.order == "shuffled"
        image_bytes = int(listing.entries["length"].sum())
        is_slow = is_shuffled and listing.random_read_bytes > MAX_READ_AGAIN * image_bytes
        if is_slow and not split.is_finished:
            progress.note(
                f"{listing.split}: shuffling {format_size(image_bytes)} reads "
                f"{format_size(listing.random_read_bytes)}, a row group for each record; if the rows are shuffled "
                "already, --order source reads each row group once"
            )


def _note_untrained(prepared: Iterable[PreparedSplit], progress: Progress) -> None:
    """Note the classes in val without images in train: a folder's name may be misspelt."""
    listings = {split.listing.split: split.listing for split in prepared}
    if not {"train", "val"} <= listings.keys():
        return
    val, train = listings["val"], listings["train"]
    only_val = np.setdiff1d(val.entries["label"], train.entries["label"])
    names = [val.labels.classes[label].name for label in only_val.tolist() if label >= 0]
    if names:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        named = ", ".join(names[:MAX_NAMED])
        progress.note(f"classes of val without an image in train: {named}{more}")


def name_notes(classes: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield notes on names of classes that look alike or like none, given the names of labels and columns."""
    for names in classes:
        shown: dict[str, str] = {}
        for each in names:
            first = shown.setdefault(unicodedata.normalize("NFKC", each).casefold().strip(), each)
            if first != each:
                yield f"{first!a} and {each!a} are two classes; if they are one, write them alike in the source"
                break
        missing = {"nan", "NaN", "<NA>"}.intersection(names)  # as pandas writes none
        yield from (f"{each} is a class; if it means none, correct the source" for each in sorted(missing))


def class_notes(output: Path, manifest: Manifest, columns: Sequence[str]) -> Iterator[str]:
    """Yield notes on classes whose name is another number, or that have one in a split beside this.

    ``columns`` names the columns to look at, "" for the labels.
    """
    for column in filter(None, columns):
        here = _class_numbers(manifest, column)
        other = next((name for name, number in here.items() if name != str(number)), None)
        if other is not None and all(name.removeprefix("-").isdecimal() for name in here):
            kind = "int" if manifest.schema[column].kind == "label" else "int32[*]"
            numbered = f"{other} in the column {column} is class {here[other]}"
            yield f"{numbered}; to keep the numbers, take the column as {kind}"
    for split in SPLITS if output.name in SPLITS else ():
        with suppress(ShardprepError, OSError):  # such as no manifest, or one of a later release
            beside = read_manifest(output.parent / split)
            for column in columns:
                here, there = (_class_numbers(each, column) for each in (manifest, beside))
                if name := next((name for name in here if there.get(name, here[name]) != here[name]), None):
                    of = f" in the column {column}" if column else ""
                    instead = "take it as text, join both from one table, or " if column else ""
                    yield (
                        f"{name}{of} is class {here[name]} here and {there[name]} in {split} beside it; "
                        f"{instead}convert both at once, such as from a list with the column split"
                    )


def _class_numbers(manifest: Manifest, column: str) -> Mapping[str, int]:
    if not column:
        return manifest.labels.label_of
    classes = manifest.schema[column].classes if column in manifest.schema else ()
    return {name: number for number, name in enumerate(classes)}
