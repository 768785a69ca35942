"""Batches of records: shapes, dtypes, alignment, remainders, and records of different form."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import FakeData, Flow
from shardprep.loaders.batches.passes import Passes
from shardprep.loaders.batches.stack import Batches

WRONG: dict[str, tuple[list[Any], str]] = {
    "shapes": ([np.zeros(2), np.zeros(3)], r"shapes: .*\(2,\).*\(3,\)"),
    "dtypes": ([np.zeros(2), np.zeros(2, np.float32)], "dtypes: .*<f4.*<f8"),
    "orders": ([np.zeros(2, "<i4"), np.zeros(2, ">i4")], "dtypes"),
    "forms": ([(1, 2), {"x": 1}], "forms: .*dict.*tuple"),
    "array and tuple": ([np.zeros(2), (1, 2)], "forms: .*ndarray.*tuple"),
    "names": ([{"x": 1}, {"y": 1}], "names"),
    "lengths": ([(1, 2), (1, 2, 3)], "numbers of parts: .*2.*3"),
    "strings": (["a", "b"], "cannot be stacked"),
    "bytes": ([b"a", b"b"], "cannot be stacked"),
    "objects": ([None, None], "cannot be stacked"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_records_that_do_not_fit_together_are_an_error(wrong: str) -> None:
    records, message = WRONG[wrong]
    with pytest.raises(UsageError, match=message):
        list(Batches(records, 2))


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": -1}, {"remainder": "pad"}])
def test_what_cannot_be_meant_is_an_error_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="batch_size"):
        Batches([1], **({"batch_size": 2} | options))


def test_keras_is_named_only_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for batches in (FakeData(2, batch_size=2), Flow.from_iterable([1])):
        monkeypatch.setitem(sys.modules, "keras", sys)
        assert str(batches) == f"{batches!r}; Keras takes shardprep.loaders.frameworks.tf_inputs() of it"

        monkeypatch.delitem(sys.modules, "keras")
        assert str(batches) == repr(batches)


def test_an_empty_source_cannot_be_peeked_at() -> None:
    with pytest.raises(UsageError, match="give a signature"):
        Passes([]).peek()
