"""Pages keep text from files as text, and allow nothing but their own style and pictures."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from shardprep.formats.reports.pages import page, shown_name

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
