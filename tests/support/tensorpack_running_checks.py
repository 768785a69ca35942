"""Facts about the rows of docs/training/from-tensorpack.md: where a flow runs, and to which consumer."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import numpy as np

from shardprep.loaders import Flow
from shardprep.loaders.tf_inputs import Input, QueueInput
from support.process_table import children
from support.tensorpack_checks import ALL, in_eights, labels_of, of, rows_of
from support.tensorpack_page import Ran
from support.tf_devices import tf

# In parallel


def running(flow: Flow, whats: Callable[[], set[Any]]) -> int:
    """The number of additional threads or processes in the middle of a pass."""
    before, items = whats(), iter(flow)
    next(items)
    return len(whats() - before)


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("shardprep")}


@of("MultiProcessRunnerZMQ")
def another_process_keeps_the_order(ran: Ran) -> None:
    with ran.value as flow:
        assert running(flow, children) == 1
        assert labels_of(flow) == labels_of(flow) == ALL


@of("MultiThreadRunner")
def another_thread_keeps_the_order(ran: Ran) -> None:
    assert running(ran.value, own_threads) == 1
    assert labels_of(ran.value) == labels_of(ran.value) == ALL


@of("MultiThreadMapData")
def threads_map_each_item_once(ran: Ran) -> None:
    ordered, unordered = ran.values
    assert running(ordered, own_threads) == 4
    for _ in range(2):
        assert labels_of(ordered, scale=255) == ALL
        assert sorted(labels_of(unordered, scale=255)) == ALL


@of("MultiProcessMapData")
def processes_map_each_item_once(ran: Ran) -> None:
    with ran.value as flow:
        assert running(flow, children) == 2
        assert labels_of(flow, scale=255) == labels_of(flow, scale=255) == ALL


@of("MultiProcessMapAndBatchData")
def processes_make_batches(ran: Ran) -> None:
    with ran.value as flow:
        assert running(flow, children) == 2
        assert rows_of(flow, scale=255) == rows_of(flow, scale=255) == in_eights(ALL)
        assert len(flow) == 13


@of("MultiProcessMapDataComponentSharedArray")
def processes_make_declared_arrays(ran: Ran) -> None:
    with ran.value as flow:
        assert rows_of(flow, scale=255) == rows_of(flow, scale=255) == in_eights(ALL)


# Other machines, and inspection


@of("send_dataflow_zmq")
def batches_come_from_another_machine_once(ran: Ran) -> None:
    here = ran.names["ds"].shuffle(100).batch(8)
    assert ran.names["epochs"] == [rows_of(here), rows_of(here)]
    assert len(here) == 13


@of("TestDataSpeed")
def speed_is_measured(ran: Ran) -> None:
    assert ran.value.items_per_second > 0
    assert "items/s" in str(ran.value)


@of("PrintData")
def two_items_are_printed(ran: Ran) -> None:
    with redirect_stderr(io.StringIO()) as said:
        assert labels_of(ran.value) == ALL
    assert [line[:16] for line in said.getvalue().splitlines() if "pass" in line] == [
        "Item 0 of pass 0",
        "Item 1 of pass 0",
    ]
    assert "uint8 [8, 8, 3]" in said.getvalue()


# Into TensorFlow


def both_epochs_are_whole(each: Input) -> None:
    assert isinstance(each, Input)
    with each:
        assert rows_of(each) == rows_of(each) == in_eights(ALL)


@of("FeedInput")
def batches_are_fed(ran: Ran) -> None:
    both_epochs_are_whole(ran.value)


@of("QueueInput")
def batches_are_queued(ran: Ran) -> None:
    both_epochs_are_whole(ran.value)


@of("BatchQueueInput")
def items_are_batched_and_queued(ran: Ran) -> None:
    both_epochs_are_whole(ran.value)


@of("StagingInput")
def batches_are_staged(ran: Ran) -> None:
    both_epochs_are_whole(ran.value)


@of("PlaceholderInput")
def placeholders_are_fed(ran: Ran) -> None:
    assert ran.names["images"].op.type == "Placeholder"
    assert np.allclose(ran.names["means"], [np.mean(labels) for labels in in_eights(ALL)])


@of("DummyConstantInput")
def constants_are_zeros(ran: Ran) -> None:
    with ran.value as each:
        assert each.dequeue().shape == (8, 8, 8, 3)
        assert not np.any(each.dequeue())


@of("TensorInput")
def tensors_are_made(ran: Ran) -> None:
    with ran.value as each:
        assert [tensor.shape for tensor in each] == [(8, 8, 8, 3)] * 10


@of("ZMQInput")
def batches_come_from_another_process(ran: Ran) -> None:
    assert ran.names["labels"] == in_eights(ALL)


@of("TFDatasetInput")
def a_dataset_is_an_input(ran: Ran) -> None:
    with ran.value as each:
        assert [int(number) for _ in range(2) for number in each] == [*range(10)] * 2


@of("dataflow_to_dataset")
def a_flow_is_a_dataset(ran: Ran) -> None:
    assert rows_of(ran.value) == rows_of(ran.value) == in_eights(ALL)
    assert ran.value.cardinality() == 13
    assert ran.value.element_spec[0] == tf.TensorSpec([None, 8, 8, 3], tf.uint8)


@of("EnqueueThread")
def the_queue_tells_how_full_it_is(ran: Ran) -> None:
    assert (ran.value.capacity, ran.value.batches) == (2, 0)
    with QueueInput(ran.names["batches"]) as each:
        list(each)
        stats = each.stats()
    assert stats.batches == 13
    assert 0 <= stats.mean_level <= stats.capacity
    assert 0 <= min(stats.starved, stats.blocked) <= max(stats.starved, stats.blocked) <= 1
