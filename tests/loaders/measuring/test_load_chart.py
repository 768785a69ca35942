"""The stages of a run as a small chart in a notebook."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from shardprep.formats.errors import DataError
from shardprep.loaders import FakeData, Flow
from shardprep.loaders.loader.run_page import RunValues


def drawn(source: FakeData | Flow) -> str:
    for _ in source:
        pass
    page = source.stats()._repr_html_()
    assert RunValues.of(json.loads(json.dumps(source.stats().to_dict()))).stages
    return page


def test_a_loaders_chart_marks_the_stage_that_limits_by_a_word() -> None:
    with FakeData(20, batch_size=10, size=(8, 8), seconds=0.0005) as data:
        page = drawn(data)

    (limit,) = re.findall(r"<tr>(?:(?!</tr>).)*<b [^>]*>limits</b>(?:(?!</tr>).)*</tr>", page)
    assert ">delay<" in limit
    assert "delay limits, at" in page
    assert "<script" not in page


def test_a_flows_chart_shows_hostile_names_as_text() -> None:
    def hostile(number: int) -> int:
        return number

    hostile.__qualname__ = "<img src=x onerror=alert(1)>" * 50
    page = drawn(Flow.from_iterable(range(50)).map(hostile, threads=1))

    assert "<img" not in page
    assert "&lt;img src=x" in page
    assert len(page) < 10_000


def test_before_a_second_batch_the_chart_says_that_nothing_is_known() -> None:
    with FakeData(2, batch_size=10, size=(8, 8)) as data:
        assert "nothing is known" in data.stats()._repr_html_()


STAGE: dict[str, Any] = {
    "name": "read", "place": "main", "utilisation": 0, "starved": 0, "blocked": 0, "seconds": 0, "limit": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": 3},
        {"loads": None},
        {"loads": [{"name": "read"}]},
        {"loads": [STAGE | {"name": 1}]},
        {"loads": [STAGE | {"utilisation": 2}]},
        {"loads": [STAGE | {"seconds": float("nan")}]},
    ],
)
def test_values_of_another_form_are_refused(change: dict[str, object]) -> None:
    with FakeData(2, batch_size=10, size=(8, 8)) as data:
        values = data.stats().to_dict()

    RunValues.of(values | {"loads": [STAGE]})
    with pytest.raises(DataError, match="not the stats"):
        RunValues.of(values | change)
