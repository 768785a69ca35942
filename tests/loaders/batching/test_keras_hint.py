"""The text of batches, which Keras' error contains."""

import sys

import pytest

from shardprep.loaders import FakeData, Flow


def test_keras_is_named_only_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for batches in (FakeData(2, batch_size=2), Flow.from_iterable([1])):
        monkeypatch.setitem(sys.modules, "keras", sys)
        assert str(batches) == f"{batches!r}; Keras takes shardprep.loaders.frameworks.tf_inputs() of it"

        monkeypatch.delitem(sys.modules, "keras")
        assert str(batches) == repr(batches)
