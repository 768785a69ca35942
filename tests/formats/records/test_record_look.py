"""A record on the screen: a short text, and in a notebook the picture."""

from __future__ import annotations

import pytest

from shardprep.formats import Record


@pytest.mark.parametrize("image", [b"", b"no picture", b"GIF89a"])
def test_what_does_not_decode_is_said_so(image: bytes) -> None:
    page = Record("k", 0, image)._repr_html_()

    assert "does not decode" in page
    assert "src=" not in page
