"""What a run is: digests of what it is made of, its identity, and the states that are refused by another."""

import functools
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep import Loader
from shardprep.formats.errors import UsageError
from shardprep.loaders import ColorJitter, EvalTransform, LocalShuffle, TrainTransform, TransformInput, Views
from shardprep.loaders.loader.digest import digest_of
from support.loaded import loader_on
from support.loader_workers import Tagging, fail


def scaled(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


def with_default(x: float, y: object = None, *, factor: float = 2.0) -> float:
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
    renumbered = Enum("Colour", {"RED": 3}, module=__name__)
    assert digest_of(renumbered.RED) == digest_of(Colour.RED)


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


def lengths(record: TransformInput, rng: np.random.Generator) -> int:
    return len(record.image)


def doubled(record: TransformInput, rng: np.random.Generator) -> int:
    return 2 * len(record.image)


def noting(record: TransformInput, rng: np.random.Generator, seen: list[str]) -> Any:
    seen.append(record.key)
    return np.zeros((4, 4, 3), np.uint8)


def same_name(source: str) -> Any:
    return eval(f"lambda record, rng: {source}")  # noqa: S307 - of this file


OTHER_TRANSFORMS: list[tuple[Any, Any, str]] = [
    (TrainTransform(32), TrainTransform(48, flip=False), r"TrainTransform\(32\) .* \(48, flip=False\)"),
    (Views([TrainTransform(32)]), Views([TrainTransform(48)]), r"\(TrainTransform\(32\),\)\) where .*\(48\)"),
    (TrainTransform(32), EvalTransform(32), r"TrainTransform\(32\) where this one has EvalTransform\(32\)"),
    (TrainTransform(32), None, r"TrainTransform\(32\) where this one has none"),
    (None, lengths, "none where this one has lengths"),
    (lengths, doubled, "lengths where this one has doubled"),
    (Tagging(), Tagging({"a key": fail}), "Tagging with other values"),
    (partial(with_default, factor=1), partial(with_default, factor=2), "partial with other values"),
    (same_name("1"), same_name("2"), "<lambda> with other code"),
]


@pytest.mark.parametrize(
    ("before", "after", "message"), OTHER_TRANSFORMS, ids=[each[2] for each in OTHER_TRANSFORMS]
)
def test_the_state_of_another_transform_is_an_error_unless_it_may_have_changed(
    lmdb_shards: Path, before: Any, after: Any, message: str
) -> None:
    with loader_on(lmdb_shards, transform=before) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
    older = {name: state[name] for name in state if name != "transform"}
    of_another_python = state | {"transform": (state["transform"] or {}) | {"python": "3.99"}}
    with loader_on(lmdb_shards, transform=after) as other:
        with pytest.raises(UsageError, match=message.replace(" .* ", f".*{type(after).__name__}")):
            other.load_state_dict(state)
        other.load_state_dict(state, transform="changed")
        other.load_state_dict(older)
        if "code" in message:
            other.load_state_dict(of_another_python)
        with pytest.raises(UsageError, match="'same' or 'changed', not 'other'"):
            other.load_state_dict(state, transform="other")  # type: ignore[arg-type]
    with loader_on(lmdb_shards, labels="sorted_wnid1_bg") as one, pytest.raises(UsageError, match="labels="):
        one.load_state_dict(state, transform="changed")


@pytest.mark.parametrize("use", [list, Loader.show_batch, Loader.first_batch])
def test_a_transform_that_changes_later_or_in_its_calls_is_the_same_in_states_and_cards(
    lmdb_shards: Path, use: Callable[[Loader], object]
) -> None:
    used, fresh = (loader_on(lmdb_shards, transform=partial(noting, seen=[])) for _ in range(2))
    with used, fresh:
        used.transform.keywords["seen"].append("the program's own")  # type: ignore[union-attr]
        use(used)
        fresh.load_state_dict(used.state_dict())
        assert (used.card(), used.identity) == (fresh.card(), fresh.identity)


OTHERS: dict[str, dict[str, Any]] = {
    "batch size": {"batch_size": 9},
    "seed": {"seed": 1},
    "shuffle": {"shuffle": LocalShuffle(61)},
    "transform": {"transform": TrainTransform(24)},
    "drop_last": {"drop_last": True},
    "labels": {"labels": "sorted_wnid1_bg"},
    "record numbers": {"with_numbers": False},
    "bad records": {"on_bad_record": "skip"},
    "rank": {"rank": 1, "world_size": 2},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_identity_names_what_decides_the_batches(name: str, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as one, loader_on(lmdb_shards, **OTHERS[name]) as other:
        differing = {n for n in one.identity if one.identity[n] != other.identity.get(n)}
    assert name in differing
    assert differing <= {name, "OpenCV"}


def test_the_identity_does_not_name_workers_nor_where_the_data_lie(
    lmdb_shards: Path, hdf5_shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").symlink_to(lmdb_shards)
    with (
        loader_on(lmdb_shards) as one,
        loader_on(tmp_path / "elsewhere", workers=1, slots=5) as other,
        loader_on(hdf5_shards) as third,
    ):
        assert one.identity == other.identity
        assert {n for n in one.identity if one.identity[n] != third.identity[n]} == {"dataset"}


@pytest.mark.slow
def test_steps_are_drawn_no_further_ahead_than_the_slots_allow(lmdb_shards: Path) -> None:
    drawn = []

    def steps() -> Any:
        for step in range(21):
            drawn.append(step)
            yield step

    with loader_on(lmdb_shards, workers=1, slots=4) as loader:
        for number, _ in enumerate(loader.steps(0, steps())):
            assert len(drawn) <= number + 1 + 2 * 4
