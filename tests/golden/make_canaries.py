"""The images of ``formats/data/canaries``, and the digests of their pixels.

Run it by hand, where OpenCV is that of the package index. It writes images only where there are none::

    python tests/golden/make_canaries.py

The pixels are those of libjpeg-turbo's exact inverse DCT and its smooth upsampling of colours, which OpenCV,
Pillow and TensorFlow's ``decode_jpeg(dct_method="INTEGER_ACCURATE")`` use.
"""

from io import BytesIO
from typing import Any

from PIL import Image

from shardprep.formats.images.decode import CANARIES as FOLDER, PIXELS, RESIZED, canary_row

# The photograph, the corner and the sides of each, its mode and how it is encoded.
IMAGES: dict[str, tuple[str, tuple[int, int, int, int], str, dict[str, Any]]] = {
    "jpeg-420.jpg": ("chelsea.jpg", (60, 40, 101, 67), "RGB", {"subsampling": "4:2:0"}),
    "jpeg-422.jpg": ("coffee.jpg", (40, 30, 83, 61), "RGB", {"subsampling": "4:2:2"}),
    "jpeg-444.jpg": ("astronaut.jpg", (150, 60, 77, 59), "RGB", {"subsampling": "4:4:4", "quality": 97}),
    "jpeg-gray.jpg": ("camera-gray.jpg", (36, 108, 67, 71), "L", {}),
    "jpeg-progressive.jpg": ("hibiscus.jpg", (180, 180, 91, 75), "RGB", {"progressive": True, "quality": 60}),
    "jpeg-restarts.jpg": ("buttercups.jpg", (252, 204, 97, 64), "RGB", {"restart_marker_blocks": 3}),
    "jpeg-cmyk.jpg": ("casa-mila.jpg", (90, 70, 65, 57), "CMYK", {}),
    "png-rgb.png": ("coffee.jpg", (200, 150, 33, 29), "RGB", {}),
}


def encoded(name: str) -> bytes:
    photograph, (x, y, width, height), mode, options = IMAGES[name]
    with Image.open(FOLDER.parent / "photographs" / photograph) as whole:
        part = whole.crop((x, y, x + width, y + height)).convert(mode)
    file = BytesIO()
    part.save(file, "PNG" if name.endswith(".png") else "JPEG", **({"quality": 85} | options))
    return file.getvalue()


def main() -> None:
    for name in IMAGES:
        if not (FOLDER / name).exists():
            (FOLDER / name).write_bytes(encoded(name))
    made = [(name, 1) for name in (*sorted(IMAGES), f"{RESIZED}jpeg-420.jpg")]
    made[1:1] = [("jpeg-420.jpg", reduction) for reduction in (2, 4, 8)]
    PIXELS.write_text("".join("\t".join(canary_row(*canary)) + "\n" for canary in made))
    print(PIXELS.read_text(), end="")


if __name__ == "__main__":
    main()
