"""Digests: equal for objects made in the same way, in any process, and different for others."""

from __future__ import annotations

import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import ColorJitter, EvalTransform, LocalShuffle, TrainTransform
from shardprep.loaders.loader.run_card import digest_of


def scaled(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


def with_default(x: float, factor: float = 2.0) -> float:
    return x * factor


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Point:
    x: int
    y: object = None


class Plain:
    def __init__(self, value: object) -> None:
        self.value = value

    def method(self) -> object:
        return self.value


class Named:
    """An object that is hashed by its identity, regardless of its contents."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self.lock = threading.Lock()


def things() -> list[Any]:
    """Objects that all differ; new ones at each call."""
    nested = {"a": [1, (2.5, None)], "b": {"x", "y", "z"}}
    return [
        *(None, True, 1, 1.0, "1", b"1", np.int64(1), [1], (1,), {1}, frozenset([1]), {1: 1}),
        *({"a": 1, "b": 2}, {"b": 2, "a": 1}, OrderedDict(a=1, b=2), [[1], 2], [1, [2]], nested),
        *(range(5), range(6), np.arange(3), np.arange(3, dtype=np.int32), np.arange(3).reshape(3, 1)),
        *(np.array(["a", None], object), Path("a"), Colour.RED, Colour.BLUE),
        *(Point(1), Point(2), Point(1, Point(1)), Plain(1), Plain(2), Plain(1).method, Plain(2).method),
        *(Plain, Point, len, np.mean, os, scaled(2.0), scaled(3.0), with_default),
        *(lambda x: x + 1, lambda x: x + 2, lambda x, y=1: x + 1),
        *(functools.partial(with_default, factor=factor) for factor in (3.0, 4.0)),
        *(Named("one"), Named("two"), np.random.default_rng(1), np.random.default_rng(2)),
        *(TrainTransform(224), TrainTransform(192), EvalTransform(224), LocalShuffle(100)),
        TrainTransform(224, color_jitter=ColorJitter(0.4, 0.4, 0.4)),
    ]


def test_different_things_have_different_digests() -> None:
    digests = [digest_of(thing) for thing in things()]

    assert all(len(digest) == 32 for digest in digests)
    assert len(set(digests)) == len(digests)


def test_things_that_hold_themselves_have_a_digest() -> None:
    holding = Plain(None)
    holding.value = [holding]
    assert digest_of(holding) == digest_of(holding)


@pytest.mark.parametrize(
    "thing",
    [threading.Lock(), [threading.Lock()], Plain(threading.Lock())],
    ids=["a lock", "a list", "an object"],
)
def test_an_object_that_cannot_be_compared_is_refused(thing: Any) -> None:
    with pytest.raises(UsageError, match="identity="):
        digest_of(thing)
