"""The pictures of the documents show what the sources make now."""

import json
import re
import sys
from typing import Any

import pytest

from support.repository import ROOT


@pytest.fixture(scope="module")
def maker() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        import make_pictures

        yield make_pictures
    sys.modules.pop("make_pictures")


def test_no_picture_is_older_than_what_it_shows(maker: Any) -> None:
    made = json.loads(maker.HASHES.read_text())
    old = [name for name in maker.INPUTS if made.get(name) != maker.hash_of(name)]

    assert not old, f"these pictures are old; run python docs/make_pictures.py: {', '.join(old)}"


def test_every_picture_is_small_and_is_shown(maker: Any) -> None:
    names = {path.name for path in maker.PICTURES.iterdir()} - {maker.HASHES.name}
    shown = {
        found
        for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
        for found in re.findall(r"!\[[^\]]+\]\((?:docs/|\.\./)?pictures/([\w.]+)\)", page.read_text())
    }

    assert names == shown == set(maker.INPUTS)
    assert all((maker.PICTURES / name).stat().st_size <= maker.MAX_BYTES for name in names)


def test_the_conversion_that_is_shown_is_interrupted_and_goes_on(maker: Any) -> None:
    picture = (maker.PICTURES / "convert.svg").read_text()

    assert re.search(r">\^C<.* shards (is|are) done.*\$ prep convert.*100%", picture, re.S)
