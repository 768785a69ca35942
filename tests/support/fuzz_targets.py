"""The fuzz targets: each mutates one file of a valid source or dataset, and reads it as a user would.

Run as a program it does several cases, so that a process that is killed by a case loses only that one::

    python fuzz_targets.py BASE LOG TARGET:FIRST:LAST ...

For each case it writes a line to LOG: the case's name before the case, then " finding" and the finding.
"""

import gzip
import math
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

import lmdb

from shardprep.formats import DataError, ShardprepError, inspect, open_collection, open_dataset, verify
from shardprep.formats.images.decode import check_decodes
from shardprep.formats.images.header import read_image_header
from shardprep.formats.records.record import LabelSpace, Record
from shardprep.formats.runtime.files import ArchiveFile
from shardprep.formats.runtime.json_record import canonical_json, parse_canonical_json, sha256_of
from shardprep.formats.shards.read import ARCHIVE_NAME
from shardprep.formats.sources.devkit import read_boxes, read_devkit
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.tfrecord import read_frames
from shardprep.loaders import ContactSheet, EvalTransform, Loader, TrainTransform
from shardprep.loaders.loader.run_log import RunLog
from shardprep.loaders.order.rng import RecordRandom
from support.mutations import change_json, mutated, mutated_png, with_png_sums, with_tar_sums
from support.record_sources import frame
from support.resealed import reseal
from support.source_builders import DEVKIT, META, TRUTH, tar_of
from support.source_members import MEMBERS

TIMEOUT_S = 60  # for one case; valid ones take milliseconds, verification a second
# beyond what the process has: 64 million pixels, decoded progressively, take half of it
MEMORY_BYTES = 1200 << 20

Target = Callable[[Random, Path, Path], None]
"""Read a mutated form of the files in the first folder; the second, empty one is for temporary files."""

TARGETS: dict[str, Target] = {}
MANY: dict[str, int] = {}


def fuzzed(many: int, name: str = "") -> Callable[[Target], Target]:
    """Make a function a target, of which the torture runs so many cases."""

    def add(target: Target) -> Target:
        of = name or target.__name__
        TARGETS[of], MANY[of] = target, many
        return target

    return add


def copied(folder: Path, scratch: Path) -> Path:
    """A copy of the folder by links; a file to change has to be replaced."""
    return Path(shutil.copytree(folder, scratch / folder.name, copy_function=os.link))


def change_file(
    path: Path, rng: Random, again: Callable[[bytes], bytes] = bytes, tokens: Sequence[bytes] = ()
) -> None:
    """Change a file, and usually correct its checksums."""
    data = mutated(path.read_bytes(), rng, tokens)
    path.unlink()
    path.write_bytes(again(data) if rng.random() < 0.7 else data)


def read_source(path: Path, split: str = "train") -> None:
    listing = recognise(path, split=split).listing(split)
    with listing.reader.open() as reader:
        for entry in listing.entries:
            reader.read(entry)
            reader.values(entry)


MATLAB = [struct.pack("<II", kind, 8) for kind in (1, 5, 6, 9, 14, 15)]
MATLAB += [
    *(struct.pack("<IId", 9, 8, number) for number in (math.inf, math.nan, -1.0, 1e300, 0.5)),
    *(struct.pack("<II", 5, 4 * count) + b"\xff\xff\xff\x7f" * count for count in (1, 2, 50, 5000)),
]


@fuzzed(2000)
def devkit(rng: Random, base: Path, scratch: Path) -> None:
    meta = base / rng.choice(["meta.mat", "plain.mat", "plain.mat"])
    parts = {META: meta.read_bytes(), TRUTH: (base / "truth.txt").read_bytes()}
    if rng.random() < 0.8:
        name = rng.choice([META, META, META, META, TRUTH])
        parts[name] = mutated(parts[name], rng, MATLAB if name == META else ())
    tar = tar_of(parts)
    if rng.random() < 0.3:
        tar = with_tar_sums(mutated(tar, rng))
    packed = gzip.compress(tar, 1)
    path = scratch / DEVKIT
    path.write_bytes(mutated(packed, rng) if rng.random() < 0.1 else packed)
    read_devkit(path)


NUMBERS = [bytes(2), bytes(4), b"\xff" * 2, b"\xff" * 4]
NUMBERS += [b"\x7f\xff\xff\xff", b"\0\0\1\0", b"\xff\xff\xff\x7f"]


XML = [
    *(b"<!DOCTYPE a>", b"&lt;", b"&#0;", b"&#x10FFFF;", b"]]>", b"<![CDATA[", b"<a>" * 5000),
    *(b"\xff\xfe", b"\0", b"nan", b"inf", b"1e999", b"-0", b"9" * 5000, b"n" * 5000),
    *(b"utf-16", b"utf-7", b"x-klingon", b"hex", b"idna"),
]


@fuzzed(5000)
def annotation(rng: Random, base: Path, scratch: Path) -> None:
    path = scratch / "ILSVRC2012_bbox_val_v3.tar"
    xml = mutated((base / "box.xml").read_bytes(), rng, XML)
    path.write_bytes(tar_of({"val/ILSVRC2012_val_00000001.xml": xml}))
    read_boxes(path, LabelSpace.of([]))


LISTS = [
    *(b'"', b"\0", b"\r", b"\n\n", b",", b" ", b"\xff", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\x1b[2J"),
    b"x" * 200_000,
]


@fuzzed(800)
def lists(rng: Random, base: Path, scratch: Path) -> None:
    kaggle = copied(base / "kaggle", scratch)
    names = ["LOC_val_solution.csv", "LOC_synset_mapping.txt", "val.txt", "ILSVRC/ImageSets/CLS-LOC/val.txt"]
    change_file(kaggle / rng.choice(names), rng, tokens=LISTS)
    read_source(kaggle, "val")


ROWS = [*LISTS, b"{", b"[" * 9999, b"\\u", b";", b"\t", b"../", b"/", b"9" * 5000, b"null", b"true", b"-1"]


PICKLES = [bytes([code]) for code in b"(.]ae)tu0N}cRbhjqr\x94\x95\x85\x86\x87\x88\x8c\x8e\x93"]
PICKLES += [b"(" * 9999, b"N" * 9999, b"h\0a" * 9999, b"\x8a\x10" + b"\xff" * 16, b"\x8b\xff\xff\xff\x7f"]
PICKLES += [b"(" + (b"\x8a\x10" + b"\x7f" * 16) * 5000 + b"t"]
PICKLES += [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x93\xcf" + b"\xff" * 8, b"\xc1", b"\xc9"]


@fuzzed(2000)
def tensorpack(rng: Random, base: Path, scratch: Path) -> None:
    path = scratch / "data.mdb"
    honest = base / rng.choice(["pickle.mdb", "text.mdb", "msgpack.mdb"])
    if rng.random() < 0.5:
        path.write_bytes(mutated(honest.read_bytes(), rng))
    else:
        write_changed_value(honest, path, rng)
    read_source(path)


def write_changed_value(honest: Path, path: Path, rng: Random) -> None:
    """An intact LMDB with one extreme value, often the list of keys."""
    with lmdb.open(str(honest), subdir=False, readonly=True, lock=False) as source, source.begin() as reading:
        records = [(bytes(key), bytes(value)) for key, value in reading.cursor()]
    chosen = rng.choice([rng.randrange(len(records)), len(records) - 1])
    target = lmdb.open(str(path), subdir=False, lock=False, sync=False, map_size=4 << 20)
    with target, target.begin(write=True) as writing:
        for at, (key, value) in enumerate(records):
            writing.put(key, mutated(value, rng, PICKLES) if at == chosen else value)


@fuzzed(3000)
def tfrecord(rng: Random, base: Path, scratch: Path) -> None:
    """A damaged file, or one that is whole with a damaged record in it."""
    path = scratch / "train-00000-of-00001"
    honest = base / rng.choice(["imagenet.tfrecord", "tfds.tfrecord"])
    if rng.random() < 0.3:
        path.write_bytes(mutated(honest.read_bytes(), rng, NUMBERS))
    else:
        with ArchiveFile(honest) as file:
            records = [data.take(data.start, data.end) for _, data in read_frames(file)]
        chosen = rng.randrange(len(records))
        records[chosen] = mutated(records[chosen], rng, NUMBERS)
        path.write_bytes(b"".join(map(frame, records)))
    read_source(path)
    recognise(path).boxes("train", LabelSpace.of([]))


TOKENS = {"tensorpack": PICKLES} | dict.fromkeys(
    ("labelled list", "metadata.csv", "metadata.jsonl", "COCO", "class folders"), ROWS
)


def source(name: str, rng: Random, base: Path, scratch: Path) -> None:
    """A source of this layout with a changed file."""
    folder = copied(base / "sources" / name, scratch)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    change_file(rng.choice(files), rng, with_tar_sums, TOKENS.get(name, NUMBERS))
    read_source(folder / MEMBERS[name].convert)


for _name in sorted(MEMBERS):
    fuzzed(50 if _name == "Parquet" else 1500, f"source of {_name}")(partial(source, _name))


def read_image(data: bytes) -> None:
    read_image_header(data)
    check_decodes(data)
    for transform in (TrainTransform(32), EvalTransform(224, resize=512, orientation="apply")):
        transform(Record("key", 0, data), RecordRandom(0)(0, 0))


@fuzzed(6000)
def png(rng: Random, base: Path, scratch: Path) -> None:
    data = (base / rng.choice(["still.png", "animated.png", "animated.png", "palette.png"])).read_bytes()
    read_image(mutated_png(data, rng) if rng.random() < 0.7 else with_png_sums(mutated(data, rng)))


JPEG = [
    bytes([0xFF, code]) for code in (0x00, 0xC0, 0xC2, 0xC4, 0xD0, 0xD8, 0xD9, 0xDA, 0xDB, 0xE1, 0xEE, 0xFF)
]
JPEG += [b"\xff\xda\0\2", b"\xff\xff\0\1", b"\0\1\xff\xff", b"Exif\0\0MM\0*\xff\xff\xff\xff"]


@fuzzed(6000)
def jpeg(rng: Random, base: Path, scratch: Path) -> None:
    name = rng.choice(["baseline.jpg", "progressive.jpg", "exif.jpg", "cmyk.jpg", "line.jpg"])
    read_image(mutated((base / name).read_bytes(), rng, JPEG))


@fuzzed(6000)
def image_kind(rng: Random, base: Path, scratch: Path) -> None:
    """A file of another kind than PNG and JPEG."""
    read_image(mutated(rng.choice(sorted((base / "kinds").iterdir())).read_bytes(), rng, NUMBERS))


def read_dataset(path: Path) -> None:
    """Read record by record, then in batches."""
    with open_dataset(path) as dataset:
        inspect(dataset)
        for record in dataset:
            assert record.image is not None
            for name in record.columns:
                with suppress(DataError):
                    record.columns[name]
        assert dataset.boxes is None or len(dataset.boxes) >= 0
    with Loader(path, batch_size=4, workers=0, rank=0, world_size=1, on_bad_record="skip") as loader:
        for _ in loader:
            pass


@fuzzed(400)
def column_table(rng: Random, base: Path, scratch: Path) -> None:
    path = copied(base / "columns", scratch)
    change_file(rng.choice(sorted(path.glob("column-*.npy"))), rng)
    reseal(path)
    verify(path, level="full", workers=1)
    read_dataset(path)


def dataset_in(rng: Random, base: Path, scratch: Path) -> Path:
    return copied(base / rng.choice(["lmdb", "hdf5", "tar"]), scratch)


@fuzzed(1500)
def manifest(rng: Random, base: Path, scratch: Path) -> None:
    path = dataset_in(rng, base, scratch)
    if rng.random() < 0.2:
        change_file(path / "manifest.json", rng)
    else:
        reseal(path, lambda honest: change_json(honest, rng))
    verify(path, level="full", workers=1)
    read_dataset(path)


@fuzzed(3000)
def collection(rng: Random, base: Path, scratch: Path) -> None:
    path = copied(base / "collections" / "deep" / "all", scratch)
    file = path / "collection.json"
    changed = parse_canonical_json(file.read_bytes())
    if rng.random() < 0.3:
        change_file(file, rng)
    else:
        change_json(changed, rng)
        with suppress(Exception):  # where the parts are no longer listed with names and roots
            known = ("name", "root", "content_root", "records")
            changed["root"] = sha256_of([[part[name] for name in known] for part in changed["parts"]])
        file.unlink()
        file.write_bytes(canonical_json(changed))
    with suppress(OSError), open_collection(path) as opened:  # a path may lead anywhere
        assert len(list(opened)) == len(opened)
        with Loader(path, batch_size=4, workers=0, rank=0, world_size=1) as loader:
            assert sum(len(labels) for _, labels in loader)


@fuzzed(1500)
def table(rng: Random, base: Path, scratch: Path) -> None:
    path = dataset_in(rng, base, scratch)
    change_file(path / rng.choice(["index.npy", "index.npy", "boxes.npy"]), rng)
    reseal(path)
    read_dataset(path)


@fuzzed(3000)
def shard(rng: Random, base: Path, scratch: Path) -> None:
    """Change a shard, or the archive that a table in its place is of."""
    path = dataset_in(rng, base, scratch)
    if (path / ARCHIVE_NAME).exists() and rng.random() < 0.3:
        change_file(path / ARCHIVE_NAME, rng)
    else:
        change_file(rng.choice(sorted(path.glob("shard-*"))), rng)
        reseal(path)
    read_dataset(path)


@fuzzed(800)
def run_card(rng: Random, base: Path, scratch: Path) -> None:
    """A card, or a state with one, that is read, and used for a replay where it is accepted."""
    name = rng.choice(["card.json", "state.json"])
    value = parse_canonical_json((base / name).read_bytes())
    path = scratch / name
    if is_json := rng.random() < 0.6:
        change_json(value, rng)
    path.write_bytes(canonical_json(value))
    if not is_json:
        change_file(path, rng)
    card = RunLog.load(path).card
    with Loader(base / "lmdb", workers=0, **card.options()) as loader, suppress(IndexError):
        ContactSheet(loader.replay(0, 0), loader.transform).png()
    if name == "card.json":
        card.save(path)


@fuzzed(40)
def verified(rng: Random, base: Path, scratch: Path) -> None:
    """Change any file of a dataset; a crash of a library is a finding of verify, and no crash of it."""
    path = copied(base / rng.choice(["lmdb", "hdf5", "tar", "columns"]), scratch)
    change_file(rng.choice([*path.glob("shard-*"), *path.glob("column-*"), *path.glob("*.npy")]), rng)
    reseal(path)
    verify(path, level="decode", workers=1)


def limit_memory() -> None:
    """Limit the memory of this process and of those that it starts."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_case(name: str, seed: int, base: Path, scratch: Path) -> str:
    """Run one case in the folder ``scratch`` and return its finding, or ""."""
    scratch.mkdir()
    signal.alarm(TIMEOUT_S)
    try:
        TARGETS[name](Random(f"{name} {seed}"), base, scratch)
    except ShardprepError as error:
        return "" if str(error).isprintable() else "shows what is not printable"
    except FileNotFoundError:  # as documented, where a manifest names a file that does not exist
        return ""
    except Exception as error:  # any other error is undocumented
        return f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.alarm(0)
        shutil.rmtree(scratch)
    return ""


def main(base: Path, log: Path, cases: list[str]) -> None:
    limit_memory()
    with tempfile.TemporaryDirectory(dir=base.parent) as folder, log.open("a", buffering=1) as lines:
        for case in cases:
            name, first, last = case.split(":")
            for seed in range(int(first), int(last)):
                lines.write(f"{name}:{seed}\n")
                if found := run_case(name, seed, base, Path(folder) / "case"):
                    lines.write(f" finding {found!r}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
