"""The measurement of a flow: that its figures are consistent, not how large they are."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow
from support.flow_members import Items


def test_bytes_are_those_of_arrays_and_bytes_at_any_depth() -> None:
    item = {"x": (np.zeros((2, 3)), [b"abc", memoryview(bytearray(4))]), "y": "text", "z": np.int16(1)}
    speed = Flow.from_iterable([item]).measure(seconds=0)

    assert speed.megabytes_per_second == pytest.approx(speed.items_per_second * (48 + 3 + 4 + 2) / 1e6)


def test_what_was_measured_is_json_and_a_sentence() -> None:
    speed = Flow(Items(10)).batch(4).measure(seconds=0.01)

    assert json.loads(json.dumps(speed.to_dict())) == speed.to_dict()
    text = str(speed)
    assert "\n" not in text
    for word in ("items/s", "rows/s", "MB/s", " pass", "ms", "CPU"):
        assert word in text
    assert "rows/s" not in str(Flow(Items(10)).measure(seconds=0))


def test_a_flow_without_items_is_not_measured() -> None:
    with pytest.raises(UsageError, match="no items"):
        Flow.from_iterable([]).measure(seconds=0.1)
