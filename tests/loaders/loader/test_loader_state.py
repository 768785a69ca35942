"""States of a loader: what they are made of, and which are refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import (
    EvalTransform,
    TrainTransform,
    TransformInput,
)
from support.loaded import loader_on
from support.loader_workers import Tagging, fail


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(state)
    assert len(text) < 2500
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def lengths(record: TransformInput, rng: np.random.Generator) -> int:
    return len(record.image)


def doubled(record: TransformInput, rng: np.random.Generator) -> int:
    return 2 * len(record.image)


def same_name(source: str) -> Any:
    return eval(f"lambda record, rng: {source}")  # noqa: S307 - of this file


OTHER_TRANSFORMS: list[tuple[Any, Any, str]] = [
    (
        TrainTransform(32),
        TrainTransform(48, flip=False),
        r"\(size=32, flip=true\) .* \(size=48, flip=false\)",
    ),
    (TrainTransform(32), EvalTransform(32), "TrainTransform where this one has EvalTransform"),
    (TrainTransform(32), None, "TrainTransform where this one has none"),
    (None, lengths, "none where this one has lengths"),
    (lengths, doubled, "lengths where this one has doubled"),
    (Tagging(), Tagging({"a key": fail}), "Tagging of other values"),
    (partial(lengths, rng=1), partial(lengths, rng=2), "partial of other values"),
    (same_name("1"), same_name("2"), "<lambda> of other code"),
]


@pytest.mark.parametrize(
    ("before", "after", "message"), OTHER_TRANSFORMS, ids=[each[2] for each in OTHER_TRANSFORMS]
)
def test_the_state_of_another_transform_is_an_error_unless_it_may_have_changed(
    lmdb_shards: Path, before: Any, after: Any, message: str
) -> None:
    with loader_on(lmdb_shards, transform=before) as loader:
        state = through_json(loader.state_dict())
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
