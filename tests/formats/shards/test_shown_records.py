"""Records and names to look at: pictures, lists and pages, in which text of files stays text."""

import base64
import hashlib
import json
import re
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import cv2
import numpy as np
import pytest

from shardprep.formats import Record, UsageError, inspect, open_dataset, report, write_dataset
from shardprep.formats.images.pictures import Gallery, ShownImage
from shardprep.formats.reports.pages import format_name, page
from support.column_datasets import EVERY_KIND, write_columns
from support.datasets import prep_here


def pictures(page: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r"base64,([\w+/=]+)", page)]


def test_some_records_are_shown_with_their_numbers_keys_and_classes(lmdb_shards: Path) -> None:
    with open_dataset(lmdb_shards) as dataset:
        shown = dataset.show(4)
        page, text = shown._repr_html_(), repr(shown)

        chosen = [dataset[place * len(dataset) // 4] for place in range(4)]
        assert len(pictures(page)) == len(shown) == 4
        for record, line in zip(chosen, text.splitlines()[1:], strict=True):
            assert record.key in page
            assert f"{record.key}, {dataset.classes[record.label]}" in line
            assert f"{len(record.image):,} bytes" in line
        assert str(dataset.path) in text.splitlines()[0]
        assert pictures(dataset.show([-1])._repr_html_()) == [dataset[-1].image]
        assert pictures(dataset.show(np.int64(1))._repr_html_()) == [dataset[0].image]
        assert dataset.place(-1) == dataset.place(len(dataset) - 1)


@pytest.mark.parametrize("records", [0, -1, 101, list(range(101))])
def test_too_many_records_are_refused(lmdb_shards: Path, records: int | list[int]) -> None:
    with open_dataset(lmdb_shards) as dataset, pytest.raises(UsageError, match="1 to 100"):
        dataset.show(records)


def test_hostile_captions_stay_bounded_text_and_large_images_are_made_small() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), np.uint8)
    large = bytes(cv2.imencode(".png", noise)[1])
    key = "<script>alert(1)</script>\x1b[2J\n\u202e" + "x" * 5000
    shown = Gallery(key, [ShownImage(large, key), ShownImage(b"", key), ShownImage(b"no image", key)])
    page, text = shown._repr_html_(), repr(shown)

    assert "<script" not in page
    assert len(page) < 200_000
    assert len(text.splitlines()) == 4
    assert all(line.isprintable() and len(line) < 1100 for line in text.splitlines())
    assert page.count("does not decode") == page.count("overflow-wrap: anywhere") == 1
    assert len(pictures(page)) == page.count("<img alt=") == 1


@pytest.mark.parametrize("image", [b"", b"no picture", b"GIF89a"])
def test_an_image_that_does_not_decode_is_reported(image: bytes) -> None:
    page = Record("k", 0, image)._repr_html_()

    assert ("does not decode" in page) == bool(image)
    assert "src=" not in page


def test_inspect_prints_columns_and_their_json(tmp_path: Path) -> None:
    write_columns(tmp_path)
    done, as_json = (prep_here("inspect", tmp_path, *more) for more in ([], ["--json"]))

    shown, found = done.stdout, json.loads(as_json.stdout)
    assert (done.returncode, as_json.returncode) == (0, 0)
    assert "column colour   label, 48 B (224 B on disk), 2 classes, 4 records each, 4 without\n" in shown
    assert " on disk), median 4 B, 5% under 4 B, 5% over 4 B, 3 classes\n" in shown
    assert [column["name"] for column in found["columns"]] == list(EVERY_KIND.names)
    assert found["columns"][6]["per_class"] == [4, 4]


def test_records_without_a_label_are_no_class_and_one_without_an_image_is_no_image(tmp_path: Path) -> None:
    write_dataset([{"x": n, "label": -1 if n < 5 else n % 2} for n in range(9)], tmp_path / "out")

    assert inspect(tmp_path / "out").per_class == (2, 2)
    write_dataset([{"x": 1, "label": 0}], tmp_path / "one")
    assert not re.search("1 records|Images|have images|0 B", report(tmp_path / "one").to_html())


HOSTILE = [
    "<script>document.title='ran'</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202egnp.exe",
    "name\nof\x1b[2J lines",
    "a" * 4000,
    "lone \ud800 surrogate",
    "{{ 7 * 7 }}{% raw %}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_stays_text_in_one_isolated_element(text: str) -> None:
    (shown,) = ElementTree.fromstring(f"<p>{format_name(text)}</p>")  # noqa: S314 - made here

    assert (shown.tag, len(shown), shown.tail) == ("bdi", 0, None)
    assert shown.text
    assert len(shown.text) <= 80
    assert shown.text.isprintable()
    assert len(shown.get("title", "")) <= 1000


def test_a_page_allows_its_own_style_and_nothing_else() -> None:
    made = page("base", title="<b>")

    style = re.search("<style>(.*)</style>", made, re.S)[1]  # type: ignore[index]
    (policy,) = re.findall('<meta http-equiv="Content-Security-Policy" content="(.*?)"', made)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert unescape(policy) == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert "<title>&lt;b&gt;</title>" in made
    assert ("</style" in style, style.isascii()) == (False, True)  # equal bytes in any encoding
