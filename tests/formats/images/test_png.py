"""A PNG with chunks against the specification is refused; of an animated one the still image is decoded."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import BadImage
from shardprep.formats.images.header import ImageFlag, ImageInfo, read_image_header, remove_animation
from shardprep.loaders import decode_rgb
from support.image_files import acTL, animated, chunk, fcTL, fdAT, png, png_head
from support.memory import memory_below

STILL = png(3, 2, 0)
TWO = animated(fcTL(1, 2, 1, 1, 1), fdAT(2), fdAT(3), before=acTL(2) + fcTL(0, 3, 2))


def test_the_many_parts_of_an_animation_take_no_memory() -> None:
    image = animated(fcTL(1, 1, 1), *map(fdAT, range(2, 20_000)), before=acTL(2) + fcTL(0, 3, 2))
    with memory_below(1 << 18):
        assert read_image_header(image).flags == ImageFlag.PNG


HEAD, REST = STILL[:33], STILL[33:]
OUT_OF_ORDER = {
    "two headers": HEAD + HEAD[8:] + REST,
    "header behind": png_head(3, 2, 0)[:8] + chunk(b"tEXt", b"a\0b") + HEAD[8:] + REST,
    "image in two places": STILL[:-12] + chunk(b"tEXt", b"a\0b") + STILL[33:-12] + STILL[-12:],
    "no image": HEAD + STILL[-12:],
    "palette behind the image": STILL[:-12] + chunk(b"PLTE", bytes(3)) + STILL[-12:],
    "no palette": png(3, 2, 3),
    **{f"chunk of kind {kind!r}": HEAD + chunk(kind, bytes(4)) + REST for kind in (b"CgBI", b"te1t")},
    "many chunks": HEAD + chunk(b"tEXt", b"a\0b") * 65_536 + REST,
}


@pytest.mark.parametrize("image", OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
def test_a_png_with_chunks_unknown_many_or_out_of_order_is_refused(image: bytes) -> None:
    with pytest.raises(BadImage, match=r"out of order|critical chunk|without its header|65536 chunks"):
        read_image_header(image)


CHUNKS = st.sampled_from(
    [
        *(fcTL(number, *place) for number in range(4) for place in [(3, 2), (1, 1, 2, 1), (3, 3), (0, 0)]),
        *(fdAT(number) for number in range(4)),
        *(acTL(frames) for frames in range(4)),
        chunk(b"fdAT"),
        chunk(b"tEXt", b"Raw profile type exif\0\nexif\n-5\n00\n"),
        chunk(b"eXIf", b"MM\0*" + bytes(12)),
    ]
)


@settings(deadline=None, max_examples=500)
@given(st.lists(CHUNKS, max_size=3), st.lists(CHUNKS, max_size=6))
def test_any_animation_decodes_as_its_still_image(before: list[bytes], behind: list[bytes]) -> None:
    image = animated(*behind, before=b"".join(before))

    assert read_image_header(image) == ImageInfo(3, 2, 1, ImageFlag.PNG)
    assert np.array_equal(decode_rgb(image), np.zeros((2, 3, 3), np.uint8))
    assert b"fdAT" not in remove_animation(image)
