"""What the loaders of a version deliver, to be compared with what later ones deliver.

Run it by hand, with the version on the path, and only for a version that was published::

    git worktree add /tmp/v02 e34bbd0
    PYTHONPATH=/tmp/v02/src python tests/golden/make_golden.py tests/golden/orders-0.2.json

Only public names are used. The datasets are made of bytes that are the same on any machine, and pixels, which
depend on OpenCV, are left out: of the transforms, their random crops are kept.
"""

import json
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from shardprep.formats import collect, write_dataset
from shardprep.loaders import EvalTransform, GlobalShuffle, Loader, LocalShuffle, Receipt, TrainTransform
from shardprep.loaders.transforms.contract import TransformInput

RECORDS, CLASSES = 97, 5
SMALL: dict[str, Any] = {"batch_size": 8, "drop_last": False}
WEIGHTS = {"part-0": 0.5, "part-1": 0.2, "part-2": 0.3}
EVERY_THIRD = list(range(1, RECORDS, 3))

# The dataset of each run, the numbers of its ranks, its epochs and the other options of its Loaders.
RUNS: dict[str, tuple[str, int, tuple[int, ...], dict[str, Any]]] = {
    "stored order": ("lmdb", 1, (0, 1), {}),
    "windows of one": ("lmdb", 1, (0, 1), {"shuffle": LocalShuffle(1)}),
    "small windows": ("lmdb", 1, (0, 1, 2), {"shuffle": LocalShuffle(5)}),
    "windows": ("hdf5", 1, (0, 1, 7), {"shuffle": LocalShuffle(40)}),
    "windows of bytes": ("lmdb", 1, (0, 1), {"shuffle": LocalShuffle("20KB")}),
    "larger windows than the dataset": ("lmdb", 1, (0,), {"shuffle": LocalShuffle(1000)}),
    "all": ("lmdb", 1, (0, 1, 1 << 40), {"shuffle": GlobalShuffle()}),
    "another seed": ("lmdb", 1, (0, 1), {"shuffle": LocalShuffle(40), "seed": 7}),
    "the last seed": ("hdf5", 1, (0, 3), {"shuffle": GlobalShuffle(), "seed": (1 << 64) - 1}),
    "two ranks": ("lmdb", 2, (0, 1), {"shuffle": LocalShuffle(40)}),
    "three ranks of full batches": ("lmdb", 3, (0,), {"shuffle": GlobalShuffle(), "drop_last": True}),
    "five ranks": ("lmdb", 5, (1,), {"shuffle": LocalShuffle(9), "batch_size": 3}),
    "full batches": ("lmdb", 1, (0,), {"shuffle": LocalShuffle(40), "batch_size": 10, "drop_last": True}),
    "two partitions": ("lmdb", 1, (0, 1), {"shuffle": LocalShuffle(40, partitions=2)}),
    "four partitions of two ranks": ("lmdb", 2, (0, 1), {"shuffle": LocalShuffle(24, partitions=4)}),
    "two partitions of four ranks": ("hdf5", 4, (0,), {"shuffle": LocalShuffle(30, partitions=2)}),
    "full partitions": ("lmdb", 2, (2,), {"shuffle": LocalShuffle(999, partitions=2), "drop_last": True}),
    "records": ("lmdb", 1, (0, 1), {"shuffle": LocalShuffle(10), "records": EVERY_THIRD}),
    "records in partitions": (
        "lmdb", 2, (0,), {"shuffle": LocalShuffle(10, partitions=2), "records": EVERY_THIRD}
    ),
    "classes": ("lmdb", 2, (0,), {"shuffle": GlobalShuffle(), "classes": ["c1", "c4"]}),
    "records and classes": ("hdf5", 1, (0,), {"records": np.arange(RECORDS) % 2 > 0, "classes": [0, 3]}),
    "a collection": ("collection", 2, (0, 1), {"shuffle": LocalShuffle(40)}),
    "all of a collection": ("collection", 1, (0,), {"shuffle": GlobalShuffle(), "classes": [1, 2]}),
    "weights": ("collection", 1, (0, 1, 5), {"shuffle": LocalShuffle(40), "weights": WEIGHTS}),
    "weights of ranks": ("collection", 2, (3,), {"shuffle": GlobalShuffle(), "weights": WEIGHTS}),
    "weights of classes": ("collection", 1, (0, 2), {"weights": WEIGHTS, "classes": [0, 1, 4]}),
}  # fmt: skip

# Steps that one number of ranks takes before others go on, with which batches.
RESUMED = [(1, 8, 4, 3, 5), (3, 5, 2, 1, 8), (2, 7, 3, 2, 11), (4, 2, 6, 2, 4)]


def image(number: int) -> bytes:
    """A PNG whose size depends on the number, and whose bytes are the same with every zlib."""
    width, height = 20 + 7 * number % 41, 20 + 11 * number % 37
    rows = b"".join(b"\0" + bytes((number * 5 + x + y) % 256 for x in range(width)) for y in range(height))
    blocks = [rows[at : at + 65535] for at in range(0, len(rows), 65535)]
    stored = b"".join(
        struct.pack("<BHH", at == len(blocks) - 1, len(block), 65535 - len(block)) + block
        for at, block in enumerate(blocks)
    )
    data = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", data), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def made(folder: Path) -> dict[str, Path]:
    """Write the same records in each container, and in three parts."""
    items = [
        {"key": f"k{number:04}", "image": image(number), "label": number * number % CLASSES}
        for number in range(RECORDS)
    ]
    options: dict[str, Any] = {"classes": [f"c{n}" for n in range(CLASSES)], "workers": 0}
    options["shard_size"] = 12_000
    for container in ("lmdb", "hdf5"):
        write_dataset(items, folder / container, container=container, **options)
    parts, first = [], 0
    for number, records in enumerate((40, 23, 34)):
        parts.append(folder / f"part-{number}")
        write_dataset(items[first : first + records], parts[-1], **options)
        first += records
    collect(folder / "collection", parts).close()
    return {name: folder / name for name in ("lmdb", "hdf5", "collection")}


def drawn(record: TransformInput, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """What is random of a record, and what is not, as bytes."""
    content = blake2b(record.image + record.key.encode(), digest_size=8).digest()
    words = rng.integers(0, 1 << 64, 2, np.uint64).tobytes() + rng.random(1).tobytes()
    return np.frombuffer(content + words + bytes([record.label]), np.uint8)


def loader_on(path: Path, **options: Any) -> Loader:
    defaults = {"transform": drawn, "workers": 0, "with_numbers": True, "rank": 0, "world_size": 1}
    return Loader(path, **(defaults | SMALL | options))


def kept(value: dict[str, Any], root: str) -> dict[str, Any]:
    """A receipt or a state without what is of one version: the root of the dataset, the card, the code.

    Since 0.4 a state has the batch size, and says from which place it, and the receipt, have been the same.
    """
    newer = ("card", "transform", "batch_size", "origin", "since", "passed")
    text = json.dumps({name: part for name, part in value.items() if name not in newer})
    found: dict[str, Any] = json.loads(text.replace(root, "root"))
    return found


def epoch_of(loader: Loader, epoch: int, steps: int = 1 << 30) -> dict[str, Any]:
    """The numbers of each batch of an epoch, the receipt, a digest of the contents, and one of the states."""
    root, contents, states, batches = loader.dataset.root, blake2b(), blake2b(), list[list[int]]()
    if loader.epoch != epoch:
        loader.set_epoch(epoch)
    for made, labels, numbers in loader:
        contents.update(np.ascontiguousarray(made).tobytes() + labels.tobytes())
        states.update(json.dumps(kept(loader.state_dict(), root), sort_keys=True).encode())
        batches.append(numbers.tolist())
        if len(batches) == steps:
            break
    return {
        "batches": batches,
        "receipt": kept(loader.receipt().to_json(), root),
        "contents": contents.hexdigest()[:32],
        "states": states.hexdigest()[:32],
    }


def epochs(folders: dict[str, Path]) -> Iterator[tuple[str, Any]]:
    for name, (kind, world, numbers, options) in RUNS.items():
        for rank in range(world):
            with loader_on(folders[kind], rank=rank, world_size=world, **options) as loader:
                for epoch in numbers:
                    yield f"{name}: epoch {epoch}, rank {rank} of {world}", epoch_of(loader, epoch)


def resumed(folders: dict[str, Path]) -> Iterator[tuple[str, Any]]:
    for before, batch, steps, after, later_batch in RESUMED:
        shuffle = LocalShuffle(20, partitions=1 + (before == 4))
        states, receipts = [], []
        for rank in range(before):
            options = {"rank": rank, "world_size": before, "batch_size": batch, "shuffle": shuffle}
            with loader_on(folders["lmdb"], **options) as loader:
                epoch_of(loader, 2, steps)
                states.append(json.loads(json.dumps(loader.state_dict())))
                receipts.append(loader.receipt())
        name = f"{after} ranks after {before}"
        yield f"{name}: state", kept(states[0], loader.dataset.root)
        for rank in range(after):
            options = {"rank": rank, "world_size": after, "batch_size": later_batch, "shuffle": shuffle}
            with loader_on(folders["lmdb"], **options) as loader:
                loader.load_state_dict(states[rank if before == after else 0])
                yield f"{name}: rank {rank}", epoch_of(loader, 2)
                receipts.append(loader.receipt())
        merged = Receipt.merge(receipts[-after:] if before == after else receipts)
        merged.check(RECORDS)
        yield f"{name}: receipt", kept(merged.to_json(), loader.dataset.root)


def crops(folders: dict[str, Path]) -> Iterator[tuple[str, Any]]:
    """The parts of the images that the transforms show."""
    transforms = {
        "TrainTransform": TrainTransform(16),
        "TrainTransform of all": TrainTransform((12, 8), scale=(0.5, 1.0), ratio=(0.5, 2.0), flip=False),
        "EvalTransform": EvalTransform(16, resize=18),
    }
    for name, transform in transforms.items():
        with loader_on(folders["lmdb"], transform=transform, seed=3) as loader:
            for epoch in (0, 4):
                shown = [record.shown for record in loader.replay(epoch, 5).records]
                yield f"{name}: epoch {epoch}", [each and each.to_json() for each in shown]


def golden(folder: Path) -> dict[str, Any]:
    """Return all that is compared, by name."""
    folders = made(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of windows that mix classes badly
        return {
            "epochs": dict(epochs(folders)),
            "resumed": dict(resumed(folders)),
            "crops": dict(crops(folders)),
        }


def main(output: Path) -> None:
    with TemporaryDirectory() as folder:
        found = golden(Path(folder))
    lines = (
        f"{json.dumps(group)}: {{\n"
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in values.items())
        + "\n}"
        for group, values in found.items()
    )
    output.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
