"""Pages keep text from files as text, and allow nothing but their own style and pictures."""

from __future__ import annotations

import base64
import hashlib
import re
import sys
from html.parser import HTMLParser
from importlib.metadata import version
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from shardprep.formats.reports.pages import bars, histogram, page, scatter, shown_name, shown_number

HOSTILE = [
    "<script>document.title='ran'</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202egnp.exe",
    "name\nof\x1b[2J lines",
    "a" * 4000,
    "lone \ud800 surrogate",
    "{{ 7 * 7 }}{% raw %}",
]


class Parsed(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_stays_text_in_one_isolated_element(text: str) -> None:
    parsed = Parsed(shown_name(text))

    assert [tag for tag, _ in parsed.tags] == ["bdi"]
    assert len(parsed.text) <= 80
    assert parsed.text.isprintable()
    assert len(parsed.tags[0][1].get("title") or "") <= 1000


@given(st.text(st.characters(), max_size=300))
def test_any_text_in_a_chart_is_text(text: str) -> None:
    made = histogram([0, 1], [1], title=text, axis=text) + bars([(text, 1.0)], title=text, axis=text)

    tags = [tag for tag, _ in Parsed(made).tags]
    assert "script" not in tags
    assert tags.count("figure") == 1
    assert tags.count("caption") == 1


def test_a_page_allows_its_own_style_and_nothing_else() -> None:
    made = page("base", title="<b>")

    style = re.search("<style>(.*)</style>", made, re.S)[1]  # type: ignore[index]
    policy = dict(Parsed(made).tags[3][1])["content"]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert "<title>&lt;b&gt;</title>" in made
    assert "</style" not in style


@pytest.mark.parametrize(
    ("argv", "command"),
    [(["/bin/prep", "report", "a b"], "prep report 'a b'"), (["train.py", "report"], ""), ([], "")],
)
def test_the_foot_has_the_version_the_day_and_the_command(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], command: str
) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")

    foot = Parsed(page("base", title="t").partition("<footer")[2]).text

    parts = [f"shardprep {version('shardprep')}", "1970-01-02", command]
    assert foot.partition(">")[2].strip() == " · ".join(part for part in parts if part)


@given(st.lists(st.floats(0.001, 1e9), min_size=2, max_size=40, unique=True).map(sorted))
def test_texts_below_a_histogram_do_not_touch_and_have_both_ends(edges: list[float]) -> None:
    made = histogram(edges, [1] * (len(edges) - 1), title="t", axis="x")

    ticks = re.findall(r'<text class="tick (middle|end)" x="(\d+)" y="166">([^<]*)<', made)
    spans = []
    for anchor, x, text in ticks:
        left = int(x) - 6 * len(text) / (1 if anchor == "end" else 2)
        spans.append((left, left + 6 * len(text)))
    assert {shown_number(edges[0]), shown_number(edges[-1])} <= {text for _, _, text in ticks}
    assert all(end < begin for (_, end), (begin, _) in pairwise(sorted(spans)[:-1]))
    assert all(end < begin for (_, end), (begin, _) in pairwise(sorted(spans)[1:]))


def test_an_outlier_does_not_squeeze_a_scatter_plot() -> None:
    points = [(400.0 + number, 300.0 + number) for number in range(399)]

    dots = re.search('class="dots" d="([^"]*)"', scatter([*points, (1e6, 1e6)], title="t", x="x", y="y"))[1]  # type: ignore[index]
    across = [int(x) for x in re.findall(r"M(\d+) ", dots)]
    assert max(across[:-1]) - min(across[:-1]) > 200  # of 284


def test_a_chart_has_its_numbers_as_text() -> None:
    made = Parsed(histogram([0, 10, 20], [3, 4000], title="Width", axis="pixels"))

    svg = next(attributes for tag, attributes in made.tags if tag == "svg")
    assert svg["role"] == "img"
    assert "4,003 images from 0 to 20; at most 4,000 in a bar." in made.text
    assert "10 to 20" in made.text


@given(st.lists(st.tuples(*[st.floats(0, 1e12)] * 2), min_size=1, max_size=30))
def test_every_point_of_a_scatter_plot_is_within_it(points: list[tuple[float, float]]) -> None:
    made = scatter(points, title="t", x="x", y="y")

    dots = re.search('class="dots" d="([^"]*)"', made)[1]  # type: ignore[index]
    places = re.findall(r"M(-?\d+) (-?\d+)h0", dots)
    assert len(places) == len(points)
    assert all(0 <= int(x) <= 360 and 0 <= int(y) <= 190 for x, y in places)
