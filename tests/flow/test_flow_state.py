"""A flow that stops and goes on elsewhere delivers, from there on, exactly what it would have delivered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from support.flow_functions import pair
from support.flow_members import plain
from support.repository import SUPPORT

ITEMS = 23


def jittered(item: Any, rng: np.random.Generator) -> Any:
    return plain(item), float(rng.random())


STEPS: dict[str, Callable[[Flow], Flow]] = {
    "shuffle": lambda flow: flow.shuffle(5, seed=1),
    "map": lambda flow: flow.map(jittered, random=True, seed=2),
    "map, threads": lambda flow: flow.map(jittered, random=True, threads=2),
    "batch": lambda flow: flow.batch(3, as_list=True).map(repr),
    "prefetch": lambda flow: flow.prefetch(3),
}


def made(steps: list[str], items: int = ITEMS) -> Flow:
    flow = Flow.from_iterable(list(range(items)))
    for step in steps:
        flow = STEPS[step](flow)
    return flow


def left_after(flow: Flow, items: int) -> Any:
    """The state after so many items over all passes, through JSON; the pass is left there."""
    while items > 0:
        drawn = iter(flow)
        for _ in drawn:
            items -= 1
            if not items:
                break
    return json.loads(json.dumps(flow.state_dict()))


def passes(flow: Flow, count: int) -> list[Any]:
    return [plain(item) for _ in range(count) for item in flow]


OTHERS = {
    "another step": lambda: made(["map", "batch"]),
    "no step": lambda: made([]),
    "another seed": lambda: made([]).shuffle(5, seed=2),
    "another window": lambda: made([]).shuffle(6, seed=1),
    "another length": lambda: made(["shuffle"], items=24),
    "another source": lambda: Flow.fake(ITEMS).shuffle(5, seed=1),
    "one step more": lambda: made(["shuffle", "prefetch"]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_state_of_another_flow_is_refused_and_changes_nothing(other: str) -> None:
    state, flow = left_after(made(["shuffle"]), 3), OTHERS[other]()
    next(iter(flow))
    before = flow.state_dict()

    with pytest.raises(UsageError, match=r"the state is from another flow: it has .* where this one has"):
        flow.load_state_dict(state)

    assert flow.state_dict() == before


GOOD = made([]).state_dict()


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        [],
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
        made([]).load_state_dict(state)


PROGRAM = """
import json, sys
from support.flow_functions import pair
from shardprep.loaders import Flow

flow = Flow.from_iterable(range(50)).shuffle(50, seed=1).map(pair, random=True, threads=2).batch(4)
flow.load_state_dict(json.loads(sys.argv[1]))
print(json.dumps([numbers.tolist() for _, numbers in flow]))
"""


@pytest.mark.slow
def test_another_process_goes_on() -> None:
    flow = Flow.from_iterable(range(50)).shuffle(50, seed=1).map(pair, random=True).batch(4)
    items = iter(flow)
    before = [next(items)[1].tolist() for _ in range(5)]

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(flow.state_dict())],
        env=os.environ | {"PYTHONPATH": SUPPORT}, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip

    assert before + json.loads(done.stdout) == [numbers.tolist() for _, numbers in flow.at_pass(0)]


@pytest.mark.slow
def test_a_flow_goes_on_behind_a_queue_of_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    from shardprep.loaders.tf_inputs import QueueInput

    def flow() -> Flow:
        return Flow.from_iterable(np.arange(40)).shuffle(40).batch(4)

    with QueueInput(flow()) as first, QueueInput(flow()) as second:
        batches = iter(first)
        before = [next(batches).numpy().tolist() for _ in range(3)]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        after = [batch.numpy().tolist() for batch in second]

    assert before + after == [batch.tolist() for batch in flow()]


@pytest.mark.slow
def test_a_flow_goes_on_as_tensors_of_pytorch() -> None:
    pytest.importorskip("torch")
    from shardprep.loaders.torch_data import to_torch

    flow = Flow.from_iterable(np.arange(40)).shuffle(40).batch(4)
    first, second = to_torch(flow), to_torch(Flow(flow.node))
    batches = iter(first)
    before = [next(batches).tolist() for _ in range(3)]
    second.load_state_dict(first.state_dict())

    assert before + [batch.tolist() for batch in second] == [batch.tolist() for batch in flow.at_pass(0)]
