"""Orders, shares of ranks, receipts, states and random values are those of version 0.2, forever.

A checkpoint of that version goes on with the batches that it would have had. Where a test of this file fails,
the code is wrong, not the file; ``tests/golden/make_golden.py`` says how that was made.
"""

import json
from typing import Any

import pytest
from make_golden import golden

from support.repository import GOLDEN

KEPT: dict[str, dict[str, Any]] = json.loads((GOLDEN / "orders-0.2.json").read_text())


@pytest.fixture(scope="module")
def present(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the present code delivers."""
    return golden(tmp_path_factory.mktemp("golden"))


@pytest.mark.parametrize("group", KEPT)
def test_what_was_delivered_in_version_0_2_is_delivered_now(
    group: str, present: dict[str, dict[str, Any]]
) -> None:
    found, kept = json.loads(json.dumps(present[group])), KEPT[group]

    assert {name for name in kept if found.get(name) != kept[name]} == set()
    assert found.keys() == kept.keys()
