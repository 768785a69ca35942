"""Datasets with known duplicates, suspects, leaks and oddities, made on purpose."""

from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np

from support.datasets import converted
from support.image_files import PHOTOGRAPHS, chunk, cmyk_jpeg, encoded, png_head, with_orientation
from support.source_builders import write

NOT_DECODED = png_head(40, 40, 2) + chunk(b"IDAT", b"no zlib") + chunk(b"IEND")
DIFFERENT = [file for file in PHOTOGRAPHS if file.name != "cmyk.jpg"]  # which is another one, in CMYK
Pair = frozenset[str]
CLASSES = ("ant", "bee", "cat")


@dataclass
class Made:
    """What was made, by keys: pairs with equal bytes, pairs that look alike, and what is odd."""

    exact: set[Pair] = field(default_factory=set)
    near: set[Pair] = field(default_factory=set)
    mislabelled: set[Pair] = field(default_factory=set)
    odd: dict[str, set[str]] = field(default_factory=dict)


def picture(number: int, side: int = 260) -> np.ndarray:
    """One of 48 different pictures: a photograph, or another part of it."""
    file = DIFFERENT[number % len(DIFFERENT)]
    photograph = cv2.imdecode(np.frombuffer(file.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    height, width = photograph.shape[:2]
    top, left = (0, 0) if number < len(DIFFERENT) else (height // 3, width // 2)
    part = photograph[top : top + height * 2 // 3, left : left + width // 2]
    return cv2.resize(part, (side, side * 3 // 4), interpolation=cv2.INTER_AREA)


def weaker(image: np.ndarray, number: int) -> bytes:
    """The same picture with other bytes: smaller, or compressed more."""
    if number % 2:
        return encoded(image, ".jpg", cv2.IMWRITE_JPEG_QUALITY, 45)
    return encoded(cv2.resize(image, None, fx=0.7, fy=0.7, interpolation=cv2.INTER_AREA))


def make_train(folder: Path) -> Made:
    """Class folders ant, bee and cat with 30 pictures, 8 copies of some, and one of each oddity."""
    made = Made()

    def put(label: str, name: str, data: bytes) -> str:
        write(folder / label / name, data)
        return f"{label}/{name}"

    for number in range(30):
        image, label = picture(number), CLASSES[number % 3]
        original = put(label, f"p{number:02}.jpg", encoded(image))
        if number < 8:
            is_exact, is_wrong = number % 2 == 0, number >= 4
            copy = encoded(image) if is_exact else weaker(image, number // 2)
            pair = frozenset((original, put("dog" if is_wrong else label, f"q{number:02}.jpg", copy)))
            (made.exact if is_exact else made.near).add(pair)
            if is_wrong:
                made.mislabelled.add(pair)
    dull = np.full((60, 60, 3), 90, np.uint8)
    odd = {
        "damaged": put("ant", "broken.png", NOT_DECODED),
        "CMYK": put("ant", "ink.jpg", cmyk_jpeg()),
        "EXIF orientation": put("bee", "turned.jpg", with_orientation(encoded(picture(30)), 6)),
        "flattest": put("bee", "dull.png", encoded(dull, ".png")),
        "brightest": put("cat", "white.png", encoded(dull * 0 + 255, ".png")),
        "darkest": put("cat", "black.png", encoded(dull * 0, ".png")),
        "blurriest": put("cat", "blurred.jpg", encoded(cv2.GaussianBlur(picture(31), (0, 0), 12))),
    }
    made.odd = {name: {key} for name, key in odd.items()}
    made.odd["tiny"] = {odd["CMYK"]}
    return made


def made_datasets(folder: Path) -> tuple[Path, Path, Made, set[str]]:
    """A train split in several shards, a val split, what is in the first, and the keys that both have."""
    made = make_train(folder / "train-images")
    for number in range(10):  # of which the first four are in the train split, too
        image = picture(number + 10 if number < 4 else number + 38)
        data = encoded(image) if number % 2 else weaker(image, number // 2)
        write(folder / "val-images" / CLASSES[(number + 10) % 3] / f"v{number}.jpg", data)
    leaked = {f"{CLASSES[n % 3]}/p{n}.jpg" for n in range(10, 14)}
    converted(folder / "train-images", folder / "train", shard_size=60_000)
    converted(folder / "val-images", folder / "val")
    return folder / "train", folder / "val", made, leaked
