"""The stages of a run as a small chart in a notebook."""

from __future__ import annotations

import json
import re

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
