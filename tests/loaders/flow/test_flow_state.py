"""A flow that stops and goes on elsewhere delivers, from there on, exactly what it would have delivered."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import write_dataset
from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow

ITEMS = 23
FLOW = Flow.from_iterable(range(ITEMS))
SHUFFLED = FLOW.shuffle(5, seed=1)
OTHERS = {
    "another step": FLOW.map(abs),
    "no step": FLOW,
    "another seed": FLOW.shuffle(5, seed=2),
    "another window": FLOW.shuffle(6, seed=1),
    "another length": Flow.from_iterable(range(24)).shuffle(5, seed=1),
    "another source": Flow.fake(ITEMS).shuffle(5, seed=1),
    "one step more": SHUFFLED.prefetch(3),
}


@pytest.mark.parametrize("flow", OTHERS.values(), ids=OTHERS.keys())
def test_the_state_of_another_flow_is_refused_and_changes_nothing(flow: Flow) -> None:
    next(iter(SHUFFLED))
    state = json.loads(json.dumps(SHUFFLED.state_dict()))
    next(iter(flow))
    before = flow.state_dict()

    with pytest.raises(UsageError, match=r"the state is from another flow: it has .* where this one has"):
        flow.load_state_dict(state)
    iter(flow)  # a pass begins with its first item

    assert flow.state_dict() == before


def test_the_state_of_a_flow_with_other_columns_is_refused(tmp_path: Path) -> None:
    write_dataset([{"a": 1, "b": 2}], tmp_path / "d", workers=0)
    one, other = (Flow.from_dataset(tmp_path / "d", columns=[name]) for name in "ab")
    with pytest.raises(UsageError, match=r"has .*columns=\('a',\).* where .*columns=\('b',\)"):
        other.load_state_dict(one.state_dict())


GOOD = FLOW.state_dict()


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        GOOD | {"version": 2},
        GOOD | {"pass": -1},
        GOOD | {"items": "3"},
        GOOD | {"items": ITEMS + 1},
    ]
    + [{name: value for name, value in GOOD.items() if name != left} for left in GOOD]
    + [GOOD | {"flow": "from_iterable"}, GOOD | {"pass": True}],
)
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(UsageError, match="state"):
        FLOW.load_state_dict(state)


installed = partial(pytest.importorskip, exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda flow: installed("shardprep.loaders.tf_inputs").QueueInput(flow.batch(4)),
        lambda flow: installed("shardprep.loaders.tf_inputs").BatchQueueInput(flow, 4),
        lambda flow: nullcontext(installed("shardprep.loaders.torch_data").to_torch(flow.batch(4))),
    ],
    ids=["queue", "batch-queue", "torch"],
)
def test_a_flow_goes_on_behind_a_queue_of_tensorflow_and_as_tensors_of_pytorch(
    wrapped: Callable[[Flow], Any],
) -> None:
    def flow() -> Flow:
        return Flow.from_iterable(np.arange(40)).shuffle(40)

    with wrapped(flow()) as first, wrapped(flow()) as second:
        batches = iter(first)
        before = [next(batches).numpy().tolist() for _ in range(3)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        after = [batch.numpy().tolist() for batch in second]

    assert before + after == [batch.tolist() for batch in flow().batch(4)]
