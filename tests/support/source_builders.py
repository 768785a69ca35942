"""Small sources built by hand: the same images as tars, as a tree and as Kaggle packs them."""

import gzip
import io
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.formats.sources.sample import Synset, meta_mat
from shardprep.formats.sources.source import Listing

BLOCK = 512
TRAIN, VAL, TEST = (f"ILSVRC2012_img_{split}.tar" for split in ("train", "val", "test"))
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
META_IN_FOLDER = "data/meta.mat"
GROUND_TRUTH_IN_FOLDER = "data/ILSVRC2012_validation_ground_truth.txt"
META, TRUTH = (f"ILSVRC2012_devkit_t12/{name}" for name in (META_IN_FOLDER, GROUND_TRUTH_IN_FOLDER))


def image(name: str) -> bytes:
    """Bytes that are not an image, but contain its name."""
    return b"\xff\xd8" + name.encode() * 30 + b"\xff\xd9"


@dataclass(frozen=True)
class Miniature:
    """Three classes with ids in another order than their wnids, as in the real devkit."""

    wnids_by_id: tuple[str, ...] = ("n02119789", "n01440764", "n02100735")
    train: dict[str, tuple[int, ...]] = field(
        default_factory=lambda: {"n01440764": (10026, 7), "n02100735": (3,), "n02119789": (12, 5, 40)}
    )
    truth: tuple[int, ...] = (3, 1, 2, 2)
    test: int = 2

    @property
    def wnids(self) -> list[str]:
        return sorted(self.wnids_by_id)

    @property
    def val_names(self) -> list[str]:
        return [f"ILSVRC2012_val_{i:08d}" for i in range(1, len(self.truth) + 1)]

    @property
    def test_names(self) -> list[str]:
        return [f"ILSVRC2012_test_{i:08d}" for i in range(1, self.test + 1)]

    def wnid_of_val(self, name: str) -> str:
        return self.wnids_by_id[self.truth[int(name[-8:]) - 1] - 1]

    @property
    def records(self) -> dict[str, dict[str, tuple[int, bytes]]]:
        """The label and the bytes by split and key."""
        label = {wnid: i for i, wnid in enumerate(self.wnids)}
        names = [(wnid, f"{wnid}_{i}") for wnid, numbers in self.train.items() for i in numbers]
        return {
            "train": {f"{wnid}/{name}": (label[wnid], image(name)) for wnid, name in names},
            "val": {name: (label[self.wnid_of_val(name)], image(name)) for name in self.val_names},
            "test": {name: (-1, image(name)) for name in self.test_names},
        }

    def write_tars(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TRAIN).write_bytes(tar_of({f"{w}.tar": self.class_tar(w) for w in self.train}))
        (folder / VAL).write_bytes(tar_of({f"{name}.JPEG": image(name) for name in reversed(self.val_names)}))
        (folder / TEST).write_bytes(tar_of({f"test/{name}.JPEG": image(name) for name in self.test_names}))
        (folder / DEVKIT).write_bytes(gzip.compress(self.devkit_tar()))
        return folder

    def class_tar(self, wnid: str) -> bytes:
        return tar_of({f"{wnid}_{i}.JPEG": image(f"{wnid}_{i}") for i in self.train[wnid]})

    def devkit_tar(self, meta: bytes | None = None, truth: bytes | None = None) -> bytes:
        lines = "".join(f"{i}\n" for i in self.truth).encode()
        return tar_of({META: meta or self.meta(), TRUTH: lines if truth is None else truth})

    def meta(self) -> bytes:
        return meta_mat(self.synsets())

    def synsets(self) -> list[Synset]:
        leaves = [Synset(w, f"word {w}", train_images=len(self.train[w])) for w in self.wnids_by_id]
        return [*leaves, Synset("n00001740", "entity", children=3)]

    def write_tree(self, folder: Path, *, foldered_val: bool = False) -> Path:
        for wnid, numbers in self.train.items():
            for i in numbers:
                write(folder / "train" / wnid / f"{wnid}_{i}.JPEG", image(f"{wnid}_{i}"))
        for name in self.val_names:
            wnid = self.wnid_of_val(name) if foldered_val else ""
            write(folder / "val" / wnid / f"{name}.JPEG", image(name))
        for name in self.test_names:
            write(folder / "test" / f"{name}.JPEG", image(name))
        return folder

    def write_devkit(self, folder: Path) -> None:
        write(folder / DEVKIT, gzip.compress(self.devkit_tar()))

    def write_caffe(self, folder: Path) -> None:
        lines = (f"{name}.JPEG {label}\n" for name, (label, _) in self.records["val"].items())
        write(folder / "val.txt", "".join(lines).encode())

    def write_kaggle(self, folder: Path) -> Path:
        self.write_tree(folder / "ILSVRC/Data/CLS-LOC")
        mapping = "".join(f"{wnid} word {wnid}\n" for wnid in self.wnids)
        write(folder / "LOC_synset_mapping.txt", mapping.encode())
        self.write_solution(folder)
        for split, name in {"train": "train_cls", "val": "val", "test": "test"}.items():
            lines = "".join(f"{key} {i}\n" for i, key in enumerate(self.records[split], start=1))
            write(folder / f"ILSVRC/ImageSets/CLS-LOC/{name}.txt", lines.encode())
        return folder

    def write_solution(self, folder: Path) -> None:
        rows = (f"{name},{self.wnid_of_val(name)} 1 2 3 4 \n" for name in reversed(self.val_names))
        write(folder / "LOC_val_solution.csv", b"ImageId,PredictionString\n" + "".join(rows).encode())


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def tar_of(
    members: Mapping[str, bytes] | Iterable[tuple[str, bytes]], *, style: int = tarfile.GNU_FORMAT
) -> bytes:
    """A tar as the standard library writes it, padded to 10,240 bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=style) as tar:
        for name, data in members.items() if isinstance(members, Mapping) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def header(name: str | bytes, size: int = 0, kind: bytes = b"0", *, size_field: bytes | None = None) -> bytes:
    """One header with arbitrary fields and a correct checksum."""
    raw = name if isinstance(name, bytes) else name.encode()
    block = bytearray(BLOCK)
    block[: len(raw)] = raw
    block[100:124] = b"0000644\0" * 3
    block[124:136] = size_field or b"%011o\0" % size
    block[136:148] = b"00000000000\0"
    block[148:156] = b" " * 8
    block[156:157] = kind
    block[257:265] = b"ustar  \0"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def headers_in(tar: bytes) -> list[int]:
    """The offsets of the headers of a valid tar."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        return [member.offset for member in opened]


def contents(listing: Listing) -> dict[str, tuple[int, bytes]]:
    """The label and the bytes by key."""
    with listing.reader.open() as reader:
        return {e["key"].decode(): (int(e["label"]), reader.read(e)) for e in listing.entries}
