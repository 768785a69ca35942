"""A flow in parts over several senders: each part is made by one of them, every item comes once, in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shardprep.loaders.machines.ledger import Ledger, Steps
from shardprep.loaders.remote import RemoteSource
from support.remote_ends import ANY_PORT, SOURCES, line_of, locally, programs, same, wired

HERE = Path()


@pytest.mark.slow
@pytest.mark.parametrize("senders", [1, 2, 3])
@pytest.mark.parametrize("name", ["in_parts", "flows_in_parts"])
def test_the_items_are_those_of_local_passes(name: str, senders: int) -> None:
    with wired(lambda: SOURCES[name](HERE), senders=senders) as source:
        found = [list(source) for _ in range(2)]

    assert all(same(*each) for each in zip(found, locally(name, HERE, passes=2), strict=True))


@pytest.mark.torture
def test_a_sender_that_is_killed_leaves_its_parts_to_others() -> None:
    with (
        RemoteSource(ANY_PORT, lease_seconds=2) as source,
        programs(2, "slowly_in_parts", HERE, source.endpoint) as senders,
    ):
        for sender in senders:
            assert line_of(sender) == "ready"
        items = iter(source)
        found = [next(items) for _ in range(20)]
        senders[0].kill()
        found += items
        source.close()

    assert same(found, locally("slowly_in_parts", HERE)[0])


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    data=st.data(),
)
def test_every_step_comes_once_whichever_senders_join_and_leave_and_wherever_it_is_continued(
    lengths: list[int], data: Any
) -> None:
    parts = len(lengths)
    ledger: Ledger[int] = Ledger(ahead=3, lease_seconds=10)
    ledger.begin(0, Steps(total=None, parts=parts), in_any_order=True)
    work: dict[bytes, list[Any]] = {}
    names, taken = iter(range(1000)), []
    for _ in range(2000):
        if ledger.steps.is_over:
            break
        action = data.draw(st.sampled_from(["work"] * 8 + ["join", "leave", "continue"]))
        if action == "continue":
            steps, work = Steps[int](start=ledger.steps.due, total=None, parts=parts), {}
            ledger = Ledger(ahead=3, lease_seconds=10)
            ledger.begin(0, steps, in_any_order=True)
        if not work or (action == "join" and len(work) < 3):
            peer = b"%d" % next(names)
            ledger.join(peer, wants=3, now=0)
            work[peer] = []
        elif action == "leave":
            peer = data.draw(st.sampled_from(sorted(work)))
            ledger.leave(peer)
            del work[peer]
        for peer, lease in ledger.grant(0):
            work[peer] += [(lease.id, step) for step in range(lease.start, lease.stop)]
        busy = [peer for peer in sorted(work) if work[peer]]
        if busy:
            peer = data.draw(st.sampled_from(busy))
            lease_id, step = work[peer].pop(0)
            number, part = divmod(step, parts)
            if number < lengths[part]:
                ledger.arrive(peer, lease_id, 0, step, step, now=0)
            else:
                ledger.end(peer, lease_id, 0, lengths[part] * parts + part)
        while ledger.steps.has_next:
            taken.append(ledger.steps.take())

    assert taken == sorted(n * parts + part for part, length in enumerate(lengths) for n in range(length))
