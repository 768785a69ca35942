"""A miniature ILSVRC12 with the official packaging and defects, made from a few photographs."""

from __future__ import annotations

import gzip
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.header import read_image_header
from shardprep.formats.records.record import official_words
from shardprep.formats.runtime.files import flush_file, name_in_os_errors
from shardprep.formats.runtime.progress import NoProgress, Progress, check_int
from shardprep.formats.runtime.user_paths import user_path

PHOTOGRAPHS = 25
MAX_NUMBER_GAP = 400  # the real set numbers train images with gaps and with up to 5 digits
JPEG_QUALITY = 92
LONGER_SIDE = (400, 500)  # pixels; the real set's mean is 473x406
PNG_SIDE = 200  # an RGBA PNG of full size would be larger than its whole class
MTIME = 1_341_360_000  # a fixed time in the summer of 2012, as in the real archives

_TRAIN_ODDITIES = (
    *("RGBA PNG", "CMYK", "grayscale", "progressive", "EXIF orientation 6", "EXIF orientation 3"),
    *("EXIF orientation 8", "corrupt EXIF", "20x17 pixels", "8x8 pixels"),
)
ODDITIES = {
    "train": dict(enumerate(_TRAIN_ODDITIES)),
    "val": {1: "CMYK", 2: "grayscale", 4: "EXIF orientation 6"},
    "test": {},
}
"""The oddities of the real set, by split and image number, which is also the photograph's number."""

ANNOTATIONS = 16  # per archive, if there are enough images

STREAMS = {"train": 1, "val": 2, "test": 3}  # each use of random numbers has its own stream
CLASSES, NUMBERS, TAR_ORDER = range(4, 7)
Pixels = npt.NDArray[np.uint8]
Members = Iterable[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class SampleImage:
    """An image to draw. ``label`` counts from 0 in devkit order; ``seed`` determines crop and brightness."""

    key: str
    label: int
    photograph: int
    seed: tuple[int, ...]
    oddity: str | None = None

    @property
    def name(self) -> str:
        """The name in its tar without ``.JPEG``, the extension of all images there, even PNGs."""
        return self.key.rpartition("/")[2]


@dataclass(frozen=True)
class SamplePlan:
    """The numbers of a sample; equal plans give equal samples. Raises UsageError for impossible numbers.

    Images of a split are counted across the classes: number ``n`` belongs to class ``n % classes``
    and shows that class's photograph ``n // classes``, so for ``n`` < 25 it is photograph ``n``.
    """

    classes: int
    train_per_class: int
    val: int
    test: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("classes", "train_per_class", "val", "test"):
            check_int(getattr(self, name), name.replace("_", "-"), least=1)
        most = len(official_words())
        if self.classes > most:
            raise UsageError(f"classes is {self.classes}; ILSVRC12 has {most} to choose from")
        check_int(self.seed, "seed", least=0)

    @cached_property
    def wnids(self) -> tuple[str, ...]:
        """The classes in devkit order, which is not sorted: ``wnids[i]`` has ILSVRC2012_ID *i* + 1."""
        official = tuple(official_words())
        order = unsorted_permutation(np.random.default_rng((self.seed, CLASSES)), len(official))
        return tuple(official[i] for i in order[: self.classes])

    def train_images(self, label: int) -> Iterator[SampleImage]:
        """Yield the images of one class by ascending number, with gaps and without padding."""
        wnid = self.wnids[label]
        rng = np.random.default_rng((self.seed, NUMBERS, label))
        gaps = rng.integers(2, MAX_NUMBER_GAP, self.train_per_class)
        for rank, number in enumerate(gaps.cumsum()):
            yield self._image(f"{wnid}/{wnid}_{number}", rank * self.classes + label, "train")

    def images(self, split: str) -> list[SampleImage]:
        """Return all images of a split: of train by class, of others by name, the order of the ground truth.

        The classes of the others are mixed and balanced. No archive has the labels of test.
        """
        if split == "train":
            return [image for label in range(self.classes) for image in self.train_images(label)]
        images = self.val if split == "val" else self.test
        mixed = np.random.default_rng((self.seed, STREAMS[split])).permutation(images)
        numbered = enumerate(mixed.tolist(), start=1)
        return [self._image(f"ILSVRC2012_{split}_{number:08d}", n, split) for number, n in numbered]

    def annotated_images(self, split: str) -> list[SampleImage]:
        """Return the images of a split that get an annotation, spread evenly."""
        images = self.images(split)
        return images[:: max(1, len(images) // ANNOTATIONS)][:ANNOTATIONS]

    def _image(self, key: str, n: int, split: str) -> SampleImage:
        rank, label = divmod(n, self.classes)
        choice = range(label % PHOTOGRAPHS, PHOTOGRAPHS, self.classes)  # more than 25 classes share them
        seed = (self.seed, STREAMS[split], label, rank)
        return SampleImage(key, label, choice[rank % len(choice)], seed, ODDITIES[split].get(n))


def unsorted_permutation(rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(count)`` that begins with a descent, so it is never sorted."""
    order = rng.permutation(count)
    order[:2] = np.sort(order[:2])[::-1]
    return order


class Album:
    """The pixels of the package's photographs, BGR uint8 [H, W, 3], sorted by name.

    ``cmyk`` is a JPEG of photograph 1. ``on_draw`` is called before each image is drawn.
    """

    def __init__(self, on_draw: Callable[[], None]) -> None:
        import cv2  # start-up time, here and below

        folder = resources.files("shardprep.formats") / "data/photographs"
        files = {p.name: p.read_bytes() for p in folder.iterdir() if p.name.endswith(".jpg")}
        self.cmyk, self.on_draw = files.pop("cmyk.jpg"), on_draw
        self.photographs = [
            np.asarray(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), np.uint8)
            for _, data in sorted(files.items())
        ]

    def draw(self, image: SampleImage) -> bytes:
        """Encode an image. Deterministic for the same releases of OpenCV and NumPy."""
        self.on_draw()
        if image.oddity == "CMYK":
            return with_segment(self.cmyk, 0xFE, image.key.encode())
        rng = np.random.default_rng(image.seed)
        return _encode(_crop(self.photographs[image.photograph], rng), image.oddity)


def _crop(photograph: Pixels, rng: np.random.Generator) -> Pixels:
    """Return a crop of 40 to 100% of each side, mirrored or not, a little brighter or darker."""
    share = rng.uniform(0.5, 1.0)
    shares = (share, share * rng.uniform(0.8, 1.0))
    if rng.random() >= 0.5:
        shares = shares[::-1]
    height, width = (round(side * share) for side, share in zip(photograph.shape, shares, strict=False))
    top = rng.integers(photograph.shape[0] - height + 1)
    left = rng.integers(photograph.shape[1] - width + 1)
    pixels = photograph[top : top + height, left : left + width]
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    light = np.clip(np.arange(256) * rng.uniform(0.85, 1.15), 0, 255).astype(np.uint8)
    scale = rng.integers(*LONGER_SIDE, endpoint=True) / max(height, width)
    return _resize(light[pixels], round(width * scale), round(height * scale))


def _resize(pixels: Pixels, width: int, height: int) -> Pixels:
    import cv2

    # the plain bilinear filter may round differently from one CPU to the next
    return np.asarray(cv2.resize(pixels, (width, height), interpolation=cv2.INTER_LINEAR_EXACT), np.uint8)


def _encode(pixels: Pixels, oddity: str | None) -> bytes:
    import cv2

    suffix, options, segment = ".jpg", [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY], b""
    match oddity:
        case "RGBA PNG":
            height, width = pixels.shape[:2]
            small = _resize(pixels, PNG_SIDE, round(height * PNG_SIDE / width))
            suffix, options = ".png", []
            pixels = np.asarray(cv2.cvtColor(small, cv2.COLOR_BGR2BGRA), np.uint8)
        case "grayscale":
            pixels = np.asarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY), np.uint8)
        case "progressive":
            options += [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]
        case "corrupt EXIF":
            segment = struct.pack(">4sI", b"MM\0*", 0x7FFFFFF0) + b"\xff" * 24  # far outside of it
        case "EXIF orientation 6" | "EXIF orientation 3" | "EXIF orientation 8":
            turns, order = {"6": (1, ">"), "3": (2, "<"), "8": (3, ">")}[oddity[-1]]
            magic = {"<": b"II*\0", ">": b"MM\0*"}[order]  # of Intel and Motorola
            tag = struct.pack(order + "IHHHIHHI", 8, 1, 0x0112, 3, 1, int(oddity[-1]), 0, 0)
            pixels, segment = np.rot90(pixels, turns), magic + tag
        case "20x17 pixels" | "8x8 pixels":
            pixels = _resize(pixels, *map(int, oddity.removesuffix(" pixels").split("x")))
    encoded = bytes(cv2.imencode(suffix, np.ascontiguousarray(pixels), options)[1])
    return with_segment(encoded, 0xE1, b"Exif\0\0" + segment) if segment else encoded


def with_segment(jpeg: bytes, marker: int, payload: bytes) -> bytes:
    """Insert a segment after the start of ``jpeg``; ``payload`` has at most 65,533 bytes."""
    return jpeg[:2] + struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload + jpeg[2:]


@contextmanager
def write_whole(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write that is renamed when complete, or removed; a kill leaves ``<name>.partial``."""
    partial = path.with_name(path.name + ".partial")
    try:
        with name_in_os_errors(partial), partial.open("wb") as file:
            yield file
        flush_file(partial)  # a power cut must not leave part of an archive under its name
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_tar(file: IO[bytes] | gzip.GzipFile, members: Members) -> None:
    """Write files without owners and with a fixed time, padded to a multiple of 10,240 bytes."""
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(data), MTIME, 0o644
            tar.addfile(member, BytesIO(data))


def train_members(plan: SamplePlan, album: Album) -> Members:
    """Yield the class tars by ascending wnid, holding one class in memory at a time."""
    for wnid, label in sorted((wnid, label) for label, wnid in enumerate(plan.wnids)):
        packed = BytesIO()
        write_tar(packed, ((f"{each.name}.JPEG", album.draw(each)) for each in plan.train_images(label)))
        yield f"{wnid}.tar", packed.getvalue()


def flat_members(plan: SamplePlan, album: Album, split: str) -> Members:
    """Yield the images, not sorted by name; those of test are in a folder ``test``."""
    images, prefix = plan.images(split), "test/" if split == "test" else ""
    rng = np.random.default_rng((plan.seed, TAR_ORDER, STREAMS[split]))
    for i in unsorted_permutation(rng, len(images)):
        yield f"{prefix}{images[i].name}.JPEG", album.draw(images[i])


ANNOTATION = """\
<annotation>
	<folder>{}</folder>
	<filename>{}</filename>
	<size>
		<width>{}</width>
		<height>{}</height>
		<depth>3</depth>
	</size>
	<object>
		<name>{}</name>
		<bndbox>
			<xmin>{}</xmin>
			<ymin>{}</ymin>
			<xmax>{}</xmax>
			<ymax>{}</ymax>
		</bndbox>
	</object>
</annotation>
"""


def box_members(plan: SamplePlan, album: Album, split: str) -> Members:
    """Yield ``<wnid>/<wnid>_<number>.xml``, or ``val/<name>.xml``, with one box for each annotated image."""
    for image in plan.annotated_images(split):
        wnid = plan.wnids[image.label]
        folder = wnid if split == "train" else "val"
        header = read_image_header(album.draw(image))
        width, height = header.width, header.height
        box = width // 4, height // 4, width * 3 // 4, height * 3 // 4
        xml = ANNOTATION.format(folder, image.name, width, height, wnid, *box)
        yield f"{folder}/{image.name}.xml", xml.encode()


# Data types and array types of a MATLAB file, from tables 1-1 and 1-3 of its description
INT8, INT32, UINT16, UINT32, DOUBLE, MATRIX, COMPRESSED = 1, 5, 4, 6, 9, 14, 15
STRUCT, CHAR, DOUBLE_ARRAY = 2, 4, 6
FIELDS = ("ILSVRC2012_ID", "WNID", "words", "num_children", "num_train_images")
NAME_BYTES = 32  # of a field's name with its terminating zero
FOLDER = "ILSVRC2012_devkit_t12"
MAT_COMMENT = "MATLAB 5.0 MAT-file, a miniature of ILSVRC2012's meta.mat"
README = """\
This is a miniature of the ILSVRC2012 development kit, made by `prep sample`: its archives are packed as the
official ones are, and their images are crops of a few free photographs. The classes' names are real, what the
images show is not of these classes. It serves to try things out and is of no use for an evaluation.

data/meta.mat                                   the classes: ILSVRC2012_ID, WNID, words, ...
data/ILSVRC2012_validation_ground_truth.txt     an ILSVRC2012_ID per validation image, by ascending file name
"""


@dataclass(frozen=True, slots=True)
class Synset:
    """A row of meta.mat: a class, or a group with children."""

    wnid: str
    words: str
    children: int = 0
    train_images: float = 0


def devkit_members(plan: SamplePlan) -> Members:
    """Yield the files of the devkit: the classes, ILSVRC2012_ID 1 first, and the ground truth of val."""
    words, number = official_words(), plan.train_per_class
    rows = [Synset(wnid, words[wnid], train_images=number) for wnid in plan.wnids]
    rows.append(Synset("n00001740", "entity", children=len(rows)))
    truth = "".join(f"{image.label + 1}\n" for image in plan.images("val"))
    yield f"{FOLDER}/readme.txt", README.encode()
    yield f"{FOLDER}/data/meta.mat", meta_mat(rows)
    yield f"{FOLDER}/data/ILSVRC2012_validation_ground_truth.txt", truth.encode()


def meta_mat(rows: Sequence[Synset]) -> bytes:
    """Return a MATLAB 5 file without a time and with the struct array ``synsets`` of shape (n, 1)."""
    names = b"".join(field.encode().ljust(NAME_BYTES, b"\0") for field in FIELDS)
    parts = [mat_element(INT32, struct.pack("<i", NAME_BYTES)), mat_element(INT8, names)]
    for number, row in enumerate(rows, start=1):
        for value in (number, row.wnid, row.words, row.children, row.train_images):
            if isinstance(value, str):
                data = mat_element(UINT16, value.encode("utf-16-le"))
                parts.append(mat_array(CHAR, (1, len(value)), data))
            else:
                parts.append(mat_array(DOUBLE_ARRAY, (1, 1), mat_element(DOUBLE, struct.pack("<d", value))))
    packed = zlib.compress(mat_array(STRUCT, (len(rows), 1), b"".join(parts), name="synsets"))
    header = MAT_COMMENT.encode().ljust(116) + bytes(8) + b"\x00\x01IM"  # version 1.0, little-endian
    return header + struct.pack("<II", COMPRESSED, len(packed)) + packed


def mat_array(kind: int, shape: tuple[int, int], content: bytes, *, name: str = "") -> bytes:
    flags, dimensions = struct.pack("<II", kind, 0), struct.pack("<2i", *shape)
    head = mat_element(UINT32, flags) + mat_element(INT32, dimensions) + mat_element(INT8, name.encode())
    return mat_element(MATRIX, head + content)


def mat_element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


@dataclass(frozen=True, slots=True)
class SampleFile:
    """An archive of a sample; ``size`` in bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """A sample: ``wnids`` in devkit order (ILSVRC2012_ID 1 first), and the number of ``images`` per split."""

    files: tuple[SampleFile, ...]
    wnids: tuple[str, ...]
    images: dict[str, int]


def make_sample(
    output: str | os.PathLike[str],
    *,
    classes: int = 10,
    train_per_class: int = 30,
    val: int = 100,
    test: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> SampleSummary:
    """Write six archives, a miniature of ILSVRC12 in its official packaging.

    Equal arguments give equal bytes with the same releases of OpenCV, NumPy and zlib. An archive gets
    its name only when it is complete.

    Args:
        output: Folder for the archives; created if it does not exist.
        classes: Number of classes, 1 to 1,000.
        train_per_class: Number of training images per class, at least 1.
        val: Number of validation images, at least 1.
        test: Number of test images, at least 1.
        seed: Chooses the classes and crops; 0 or more.
        progress: Receives the progress; None shows none.

    Returns:
        The classes, and the number of images.

    Raises:
        UsageError: The folder holds such an archive already, or a number is not possible.
        OSError: The disk fails.
    """
    folder = user_path(output)
    plan = SamplePlan(classes, train_per_class, val, test, seed)
    images = {"train": classes * train_per_class, "val": val, "test": test}
    annotated = sum(len(plan.annotated_images(split)) for split in ("train", "val"))  # drawn twice, for sizes
    progress = progress or NoProgress()
    drawn = count()
    with progress.task("sample", records=sum(images.values()) + annotated, size=0):
        album = Album(lambda: progress.at(next(drawn), 0))
        archives = {
            "ILSVRC2012_img_train.tar": train_members(plan, album),
            "ILSVRC2012_img_val.tar": flat_members(plan, album, "val"),
            "ILSVRC2012_img_test.tar": flat_members(plan, album, "test"),
            "ILSVRC2012_devkit_t12.tar.gz": devkit_members(plan),
            "ILSVRC2012_bbox_train_v2.tar.gz": box_members(plan, album, "train"),
            "ILSVRC2012_bbox_val_v3.tgz": box_members(plan, album, "val"),
        }
        for path in (folder / name for name in archives):
            if path.exists():
                raise UsageError("exists already; choose another folder, or delete it", path=path)
        folder.mkdir(parents=True, exist_ok=True)
        for name, members in archives.items():
            with write_whole(folder / name) as file:
                if name.endswith("gz"):
                    with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) as packed:
                        write_tar(packed, members)
                else:
                    write_tar(file, members)
    files = tuple(SampleFile(name, (folder / name).stat().st_size) for name in archives)
    return SampleSummary(files, plan.wnids, images)
