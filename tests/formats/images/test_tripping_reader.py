"""Any exception of a reader over an untrusted image is a bad image."""

import struct

import pytest

from shardprep.formats.errors import BadImage
from shardprep.formats.images import kinds as jpeg
from shardprep.formats.images.header import READERS, read_image_header


def test_bytes_that_trip_the_reader_of_images_are_a_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def trip(image: bytes) -> None:
        raise struct.error("short")

    monkeypatch.setitem(READERS, (jpeg.JPEG_SIGNATURE,), trip)
    with pytest.raises(BadImage, match=r"cannot be read \(error: short\)") as caught:
        read_image_header(b"\xff\xd8\xff")
    assert isinstance(caught.value.__cause__, struct.error)
