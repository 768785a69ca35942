"""An OpenCV that crashes at certain images, in every process that is started while it is installed."""

import os
import sys
from pathlib import Path

import pytest

from support.image_files import encoded, pixels, segment
from support.source_builders import write

CRASH = b"this one crashes the decoder"

# Run by each interpreter that starts with the folder on its path.
_SITE = f"""\
import os, signal, sys
import cv2

sys.modules["simplejpeg"] = None  # it decodes these images

decode = cv2.imdecode

def imdecode(data, flags):
    if {CRASH!r} in data.tobytes():
        os.kill(os.getpid(), int(os.environ.get("CRASH", signal.SIGSEGV)))
    return decode(data, flags)

cv2.imdecode = imdecode
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make child processes, but not this one, crash at the images that :func:`crashing` makes."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE)
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), path])))
    assert "sitecustomize" not in sys.modules or not hasattr(sys.modules["sitecustomize"], "imdecode")


def crashing(image: bytes) -> bytes:
    """An intact JPEG or BMP at which the installed decoder crashes."""
    return image + CRASH if image.startswith(b"BM") else image[:2] + segment(0xFE, CRASH) + image[2:]


def write_images(folder: Path, count: int, *crashing_ones: int, suffix: str = ".jpg") -> Path:
    """Folders of two classes with so many different images, some of which crash the decoder."""
    for at in range(count):
        image = encoded(pixels(8 + at, 9, 3), suffix)
        image = crashing(image) if at in crashing_ones else image
        write(folder / f"class{at % 2}" / f"{at:03}{suffix}", image)
    return folder
