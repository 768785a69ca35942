"""One epoch: each record once over all ranks, wherever it stops and whichever rank continues."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from sampling import torture_except

from shardprep.formats.errors import UsageError
from shardprep.loaders import GlobalShuffle, LocalShuffle, Receipt
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resumed
from shardprep.loaders.order.epoch_order import Shuffle
from shardprep.loaders.order.rank_split import RankSplit

SHARDS = (13, 5, 0, 20, 2)
RECORDS = sum(SHARDS)


def plan(**options: Any) -> EpochPlan:
    defaults = {
        "dataset": "sha256:abc",
        "shard_counts": SHARDS,
        "shuffle": LocalShuffle(9),
        "seed": 7,
        "batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "drop_last": False,
    }
    return EpochPlan(**(defaults | options))


def run(epoch: Epoch, steps: int | None = None) -> list[list[int]]:
    """Deliver so many batches, or all of them and the end of the epoch."""
    batches = []
    for numbers in epoch.batches():
        if len(batches) == steps:
            break
        epoch.delivered(numbers, [])
        batches.append(numbers.tolist())
    else:
        epoch.end()
    return batches


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


shuffles = st.one_of(st.none(), st.just(GlobalShuffle()), st.integers(1, 60).map(LocalShuffle))
counts = st.lists(st.integers(0, 30), min_size=1, max_size=6).map(tuple)


@given(
    shard_counts=counts,
    shuffle=shuffles,
    batch=st.integers(1, 20),
    world=st.integers(1, 5),
    drop_last=st.booleans(),
    number=st.integers(0, 3),
)
def test_every_record_comes_once_over_all_ranks_or_is_stated_as_left_out(
    shard_counts: tuple[int, ...],
    shuffle: Shuffle | None,
    batch: int,
    world: int,
    drop_last: bool,
    number: int,
) -> None:
    options = {"shard_counts": shard_counts, "shuffle": shuffle, "batch_size": batch, "drop_last": drop_last}
    total = sum(shard_counts)
    assume(total >= world * (batch if drop_last else 1))
    epochs = [Epoch(plan(**options, rank=rank, world_size=world), number) for rank in range(world)]

    batches = [run(epoch) for epoch in epochs]

    delivered = sorted(flat(flat(batches)))  # type: ignore[arg-type]
    receipt = Receipt.merge(epoch.receipt for epoch in epochs)
    receipt.check(total, left_out=total % (batch * world) if drop_last else 0)
    assert [len(epoch) for epoch in epochs] == [len(part) for part in batches]
    assert all(epoch.is_over for epoch in epochs)
    assert receipt.count == len(set(delivered)) == len(delivered)
    assert receipt.left_out.count == total - len(delivered)
    assert receipt.left_out.count == (total % (batch * world) if drop_last else 0)


@given(
    shuffle=shuffles,
    batch=st.integers(1, 12),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    steps=st.integers(0, 12),
    batch_after=st.integers(1, 12),
    world_after=st.integers(1, 4),
)
def test_an_epoch_goes_on_exactly_after_a_change_of_batch_size_and_world(
    shuffle: Shuffle | None,
    batch: int,
    world: int,
    drop_last: bool,
    steps: int,
    batch_after: int,
    world_after: int,
) -> None:
    assume(not drop_last or max(batch * world, batch_after * world_after) <= RECORDS)
    options = {"shuffle": shuffle, "drop_last": drop_last}
    before = [Epoch(plan(**options, batch_size=batch, rank=r, world_size=world), 1) for r in range(world)]
    done = [run(epoch, steps) for epoch in before]
    state = json.loads(json.dumps(before[0].state()))

    after = [
        resumed(plan(**options, batch_size=batch_after, rank=r, world_size=world_after), state)
        for r in range(world_after)
    ]
    rest = [run(epoch) for epoch in after]

    place, order = state["place"], before[0].plan.order(1)[:].tolist()
    left_out = (RECORDS - place) % (batch_after * world_after) if drop_last else 0
    assert sorted(flat(flat(done))) == sorted(order[:place])  # type: ignore[arg-type]
    assert sorted(flat(flat(rest))) == sorted(order[place : RECORDS - left_out])  # type: ignore[arg-type]
    carried_on = (
        before[:1] if world == world_after else []
    )  # rank 0 of the same world continues with its receipt
    ended = [epoch.receipt for epoch in before if epoch not in carried_on]
    if not before[0].is_over:
        Receipt.merge([*ended, *(epoch.receipt for epoch in after)]).check(RECORDS, left_out=left_out)


@given(
    batch=st.integers(1, 9),
    world=st.integers(1, 4),
    drop_last=st.booleans(),
    steps=st.integers(0, 12),
)
def test_every_rank_that_goes_on_from_its_own_state_ends_as_if_it_had_not_stopped(
    batch: int, world: int, drop_last: bool, steps: int
) -> None:
    for rank in range(world):
        mine = plan(batch_size=batch, rank=rank, world_size=world, drop_last=drop_last)
        whole, stopped = Epoch(mine, 2), Epoch(mine, 2)
        batches = run(whole)
        first = run(stopped, steps)
        went_on = resumed(mine, json.loads(json.dumps(stopped.state())))

        assert first + run(went_on) == batches
        assert went_on.receipt == whole.receipt
        assert went_on.is_over


def test_ranks_agree_on_the_place_and_on_when_an_epoch_is_over() -> None:
    epochs = [
        Epoch(plan(batch_size=3, rank=rank, world_size=4), 0) for rank in range(4)
    ]  # 3 full steps, 4 left

    for step in range(4):
        for epoch in epochs:
            run_one(epoch, step)
        assert {epoch.place for epoch in epochs} == {min(RECORDS, 12 * (step + 1))}
        assert {epoch.is_over for epoch in epochs} == {step == 3}


def run_one(epoch: Epoch, step: int) -> None:
    epoch.delivered(list(epoch.batches())[step], [])


def test_a_rank_without_a_share_of_the_rest_is_over_only_once_it_asked_for_more() -> None:
    last = plan(shard_counts=(9,), batch_size=2, rank=3, world_size=4)
    epoch = Epoch(last, 0)

    (numbers,) = epoch.batches()
    epoch.delivered(numbers, [])

    assert not epoch.is_over  # other ranks have one more batch, which this state has to include
    assert epoch.state()["place"] == 8
    epoch.end()
    assert epoch.is_over


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"batch_size": 41, "drop_last": True},
            "40 records has no batch with batch_size=41 and drop_last=True; "
            "use a batch_size of at most 40 or drop_last=False",
        ),
        (
            {"batch_size": 21, "drop_last": True, "world_size": 2},
            "40 records has no batch with batch_size=21 for each of 2 ranks and drop_last=True; "
            "use a batch_size of at most 20 or drop_last=False",
        ),
        (
            {"batch_size": 1, "drop_last": True, "world_size": 41},
            "batch_size=1 for each of 41 ranks and drop_last=True; use at most 40 ranks",
        ),
        (
            {"batch_size": 8, "world_size": 41},
            "batch_size=8 for each of 41 ranks and drop_last=False; use at most 40 ranks",
        ),
    ],
)
def test_an_epoch_without_a_batch_is_an_error_for_every_rank(options: dict[str, Any], named: str) -> None:
    for rank in range(options.get("world_size", 1)):
        with pytest.raises(UsageError, match=named):
            plan(**options, rank=rank)


@given(batch=st.integers(1, 50), world=st.integers(1, 50), drop_last=st.booleans())
def test_a_plan_is_refused_exactly_where_a_rank_would_have_no_batch(
    batch: int, world: int, drop_last: bool
) -> None:
    fewest = min(len(RankSplit(RECORDS, batch, rank, world, drop_last)) for rank in range(world))

    with nullcontext() if fewest else pytest.raises(UsageError, match="no batch"):
        plan(batch_size=batch, world_size=world, drop_last=drop_last)


def test_what_was_left_out_is_not_stated_before_the_end() -> None:
    epoch = Epoch(plan(batch_size=10, drop_last=True), 0)

    run(epoch, 3)

    assert epoch.receipt.left_out.count == 0
    assert epoch.state()["receipt"]["left_out"]["count"] == 0


def test_skipped_records_are_accounted_for_and_carried_on() -> None:
    epoch = Epoch(plan(batch_size=10), 0)
    first = next(epoch.batches())
    epoch.delivered(first[2:], first[:2].tolist())

    went_on = resumed(epoch.plan, epoch.state())
    run(went_on)

    assert went_on.receipt.skipped == tuple(sorted(first[:2].tolist()))
    went_on.receipt.check(RECORDS, skipped=2)
    assert went_on.receipt.count == RECORDS - 2


@pytest.mark.parametrize("shuffle", [LocalShuffle(9), GlobalShuffle()])
def test_orders_differ_between_epochs_and_seeds_and_agree_between_plans(shuffle: Shuffle) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return flat(run(Epoch(plan(shuffle=shuffle, seed=seed), epoch)))

    assert order(7, 0) == order(7, 0)
    assert len({tuple(order(seed, epoch)) for seed in (7, 8) for epoch in (0, 1)}) == 4


STATE = Epoch(plan(), 0).state()
FOREIGN = [
    ({"version": 2}, "version"),
    ({"version": None}, "version"),
    ({"dataset": "sha256:abd"}, "another dataset"),
    ({"seed": 8}, "another seed"),
    ({"shuffle": None}, "another shuffle"),
    ({"shuffle": {"kind": "local", "window": 10}}, "another shuffle"),
    ({"shuffle": "no"}, "another shuffle"),
    ({"epoch": -1}, "epoch"),
    ({"epoch": 1}, "another epoch"),
    ({"epoch": "0"}, "epoch"),
    ({"epoch": 1 << 64}, "epoch"),
    ({"place": -1}, "place"),
    ({"place": RECORDS + 1}, "cannot continue"),
    ({"place": 1.0}, "place"),
    ({"place": True}, "place"),
    ({"place": [4]}, "place"),
    ({"rank": None}, "rank"),
    ({"world_size": "1"}, "world_size"),
    ({"receipt": None}, "receipt"),
    ({"receipt": []}, "receipt"),
    ({"receipt": {}}, "receipt"),
    ({"receipt": STATE["receipt"] | {"version": 9}}, "receipt"),
    ({"receipt": STATE["receipt"] | {"dataset": "sha256:abd"}}, "another epoch or dataset"),
    ({"receipt": STATE["receipt"] | {"epoch": 4}}, "another epoch or dataset"),
    ({"receipt": STATE["receipt"] | {"delivered": {"count": -4, "digest": "0" * 32}}}, "receipt"),
    ({"receipt": STATE["receipt"] | {"delivered": {"count": 4, "digest": "x" * 32}}}, "receipt"),
]


@pytest.mark.parametrize(("change", "message"), FOREIGN)
def test_a_state_that_is_not_of_this_plan_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resumed(plan(), STATE | change)


@pytest.mark.parametrize("state", [None, {}, [], "state", 3, {"version": 1}])
def test_what_is_no_state_is_an_error(state: object) -> None:
    with pytest.raises(UsageError):
        resumed(plan(), state)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from(sorted(STATE)), value=json_values)
def test_no_state_whatever_raises_anything_but_a_usage_error(name: str, value: object) -> None:
    try:
        epoch = resumed(plan(), STATE | {name: value})
    except UsageError:
        return
    run(epoch)


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(UsageError, match="another dataset and shuffle and seed"):
        resumed(plan(), STATE | {"dataset": "", "shuffle": None, "seed": 0})


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_an_epoch_that_has_no_random_numbers_is_an_error(number: int) -> None:
    with pytest.raises(UsageError, match="epoch must be"):
        Epoch(plan(), number)


def test_a_state_is_small_and_of_one_size_for_any_dataset() -> None:
    small = json.dumps(Epoch(plan(), 0).state())
    big = Epoch(plan(shard_counts=(1 << 20,) * 100), 0, start=50 << 20)

    assert len(json.dumps(big.state())) < len(small) + 20 < 1000


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "shuffle",
    torture_except(
        ["None", "LocalShuffle(50_000)", "LocalShuffle(1_000_000)", "GlobalShuffle()"], "LocalShuffle(50_000)"
    ),
)
def test_order_and_state_of_imagenet_take_less_than_50_mb_in_any_window(shuffle: str) -> None:
    script = f"""
import json
from pathlib import Path
from shardprep.loaders import GlobalShuffle, LocalShuffle
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resumed

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

before = peak()
plan = EpochPlan("root", (2224,) * 576, {shuffle}, 0, 256, 0, 2, True)
epoch = Epoch(plan, 0)
for turn in range(4):
    for step, numbers in zip(range(100), epoch.batches()):
        epoch.delivered(numbers, [])
    del numbers
    epoch = resumed(plan, json.loads(json.dumps(epoch.state())))
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert float(done.stdout) < 50


def test_a_batch_of_numbers_is_int64() -> None:
    assert next(Epoch(plan(), 0).batches()).dtype == np.int64
