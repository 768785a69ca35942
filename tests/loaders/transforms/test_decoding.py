"""Every kind of image is decoded to RGB, or raises BadImage."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardprep.formats.images.opencv import require_opencv


@pytest.mark.parametrize("version", ["4.11.0", "4.8.1.78", "3.4"])
def test_an_opencv_that_accepts_truncated_images_is_refused(version):
    with pytest.raises(ImportError, match=r"install opencv-python-headless 4\.12"):
        require_opencv(version)


@pytest.mark.slow
def test_no_room_for_the_pixels_says_nothing_of_the_image() -> None:
    script = """
import resource
import numpy as np
from shardprep.formats.images.decode import check_decodes
from shardprep.formats.images.decode import decode; from shardprep.formats.images.opencv import cv2

image = cv2.imencode(".jpg", np.zeros((6000, 6000, 3), np.uint8))[1].tobytes()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
try:
    check_decodes(image)
except MemoryError as error:
    print(error)
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert (done.stdout, done.stderr) == ("there is no room for an image's pixels\n", "")
