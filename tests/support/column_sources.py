"""Sources of images with columns beside them: tables, paired folders and COCO's instances."""

import csv
import json
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from support.image_files import encoded, pixels
from support.source_builders import write

CAPTIONS = ("plain", 'with "quotes", and commas', "two\nlines", "grün 中", "")


def picture(number: int, *, grey: bool = False) -> bytes:
    """An image that differs by its number."""
    return encoded(pixels(6, 9 + number) if grey else pixels(6, 9 + number, 3), ".png")


def write_pictures(folder: Path, names: Sequence[str], *, grey: bool = False) -> None:
    """Write a picture for each name, which differ."""
    for number, name in enumerate(names):
        write(folder / name, picture(number, grey=grey))


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header."""
    text = StringIO()
    table = csv.DictWriter(text, [*rows[0]])
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def as_json_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def rows_of(names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each image, of all guessed kinds."""
    return [
        {"file_name": name, "age": 7 * number - 3, "score": number / 4 + 0.5, "caption": CAPTIONS[number % 5]}
        for number, name in enumerate(names)
    ]


def coco_instances(names: Sequence[str]) -> dict[str, Any]:
    """Instances with two categories, in which the n-th image of 10 x 20 pixels has n annotations."""
    images = [
        {"id": 100 - n, "file_name": name, "width": 10, "height": 20, "note": "é"}
        for n, name in enumerate(names)
    ]
    annotations = [
        {
            "id": 10 * n + m,
            "image_id": 100 - n,
            "category_id": (90, 3)[m % 2],
            "bbox": [m, 2 * m, 4, 5.5],
            "iscrowd": m % 2,
            "segmentation": [[m, 1.5, "é"]],
        }
        for m in range(len(names))
        for n in range(m + 1, len(names))
    ]
    categories = [{"id": 90, "name": "brush"}, {"id": 3, "name": "car"}]
    return {"info": {"year": 17}, "images": images, "annotations": annotations, "categories": categories}
