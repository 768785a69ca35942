"""Maps and passes in threads and processes: exact, in order, also if workers die, and ended with the pass."""

import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shardprep.formats.errors import OperationError, UsageError, WorkerDied
from shardprep.loaders.batches.pickling import PickledValue, class_pickles
from shardprep.loaders.engine.messages import WorkFailed
from shardprep.loaders.flow import process_map
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.node import PassResources
from support.sampling import torture_except
from support.scripts import Start, line_of, outcome, scripts
from support.tensorflow_log import without_tensorflow_log


def square(x: int) -> int:
    return x * x


def numbers(count: int) -> Flow:
    return Flow.from_iterable(range(count))


def test_lambdas_closures_and_any_values_go_both_ways() -> None:
    values = [
        *(None, b"bytes", b"", bytearray(b"x"), "text", np.float32(3), 1 << 80),
        *(np.zeros((0, 3)), np.zeros(2, "V0"), np.array(5, ">i4"), np.array([1, None], object)),
        *(np.zeros(2, [("a", "f4"), ("b", "i8")]), np.array(["2020-01-01"], "M8[ns]")),
        *(np.ma.array([1, 2], mask=[False, True]), {1: np.arange(3)}, (1, [np.ones(2)])),
    ]
    extra = object
    items = [(value, wrapped) for wrapped in (True, False) for value in values[not wrapped :]]
    flow = Flow.from_iterable(items)
    with flow.map(lambda x: (x[0], type(x[0]) is extra) if x[1] else x[0], processes=1) as flow:
        found = list(flow)
    np.testing.assert_equal([x for x, _ in found[: len(values)]], values)
    np.testing.assert_equal(found[len(values) :], values[1:])
    assert [type(x) for x in found[len(values) :]] == [type(x) for x in values[1:]]


def test_a_class_of_items_is_pickled_once_for_all_of_them_and_anew_after_a_close() -> None:
    local: Any = type("Local", (), {})
    with Flow.from_iterable([local()] * 4).map(lambda item: item.times, processes=1) as flow:
        for local.times in (1, 2):
            assert list(flow) == [local.times] * 4
            assert class_pickles[local] in PickledValue.of(local()).stream
            flow.close()


@pytest.mark.torture
def test_an_item_that_kills_every_worker_is_named() -> None:
    with numbers(20).map(lambda x: os._exit(3) if x == 7 else x, processes=1) as flow:
        items = iter(flow)
        assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(WorkerDied, match=r"^item 7 of pass 0, at map\(\S+\): 3 workers .* of a Flow"):
            list(items)


ODD = "raise type('Odd', (Exception,), {'__reduce__': lambda _: (int, ())})"
FAULTS: dict[str, Any] = {
    "exception": (lambda: 1 // 0, ZeroDivisionError, "division"),
    "exit": (sys.exit, WorkFailed, "SystemExit"),
    "interruption": (lambda: exec("raise KeyboardInterrupt"), WorkFailed, "KeyboardInterrupt"),  # noqa: S102
    "end": (lambda: next(iter(())), RuntimeError, "StopIteration"),
    "number": (lambda: exec(ODD), WorkFailed, "Odd"),  # noqa: S102
    "generator": (lambda: (x for x in ()), UsageError, "generator, cannot be sent from another process"),
    "lock": (threading.Lock, UsageError, "Return what can be pickled, or use threads"),
}


@pytest.mark.slow
def test_whatever_a_function_does_comes_after_the_results_before_it_and_names_its_item() -> None:
    fault: list[str] = []

    def function(item: tuple[int, str]) -> Any:
        return FAULTS[item[1]][0]() if item[0] == 37 else item[0]

    with Flow.from_callable(lambda: ((x, fault[-1]) for x in range(100))).map(function, processes=1) as flow:
        for name in FAULTS:
            fault.append(name)
            found: list[int] = []
            with pytest.raises(FAULTS[name][1]) as raised:
                found.extend(flow)
            told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
            assert found == list(range(37)), name
            assert FAULTS[name][2] in told
            assert "item 37 of pass" in told
            assert "at map(" in told


def test_results_of_processes_that_do_not_stack_are_an_error_with_the_number_of_the_batch() -> None:
    with numbers(12).map(lambda n: np.zeros(1 + n // 11), processes=1).batch(4) as flow:
        batches = iter(flow)
        assert [len(next(batches)) for _ in range(2)] == [4, 4]
        with pytest.raises(UsageError, match=r"different shapes: \(1,\) and \(2,\); make") as caught:
            next(batches)
    assert caught.value.__notes__ == ["In item 2 of pass 0, at batch(4)"]


def test_a_resumed_pass_has_the_processes_and_batches_of_a_whole_one() -> None:
    with numbers(22).map(square, processes=1).batch(4) as flow:
        flow.load_state_dict(flow.state_dict() | {"items": 2})
        passes = [np.concatenate(list(flow)).tolist() for _ in range(2)]
        assert [len(batch) for batch in flow.pick(0, [5, 0, 5])] == [2, 4, 2]
        assert len(multiprocessing.active_children()) == 1
    assert passes == [[n * n for n in range(first, 22)] for first in (8, 0)]


def test_a_killed_worker_loses_and_repeats_nothing_and_another_sees_the_item_as_it_was(
    tmp_path: Path,
) -> None:
    def spoiling(array: Any) -> int:
        found = int(array.sum())
        array[:] = 1000
        if found == 20 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    with Flow.from_iterable([np.full(1, n) for n in range(40)]).map(spoiling, processes=2) as flow:
        assert list(flow) == list(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", torture_except([4, 64], 4))
def test_a_process_is_at_most_so_many_items_ahead(tmp_path: Path, ahead: int) -> None:
    def source() -> Iterator[int]:
        with (tmp_path / "drawn").open("wb", buffering=0) as file:
            for number in range(1000):
                file.write(b".")
                yield number

    with Flow.from_callable(source).in_process(ahead=ahead) as flow:
        items = iter(flow)
        for taken in range(1, 200):
            next(items)
            assert (tmp_path / "drawn").stat().st_size - taken <= ahead


@pytest.mark.torture
def test_a_forked_copy_of_a_flow_has_workers_of_its_own_and_so_has_a_pass_after_it_was_closed() -> None:
    with numbers(30).map(square, processes=1) as flow:
        list(flow)
        pid = os.fork()
        if not pid:
            with flow:
                os._exit(0 if list(flow) == [x * x for x in range(30)] else 1)
        assert os.waitpid(pid, 0)[1] == 0
        for _ in range(2):
            assert len(list(flow)) == 30
            assert len(multiprocessing.active_children()) == 1
            flow.close()
            assert not multiprocessing.active_children()


def test_too_little_address_space_is_said_to_be_that() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        with pytest.raises(OperationError, match="ulimit -v"):
            next(iter(numbers(3).map(square, processes=1)))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


TEST_TIMEOUT_S = 240.0  # a limit for a busy machine, far above what the tests need


def test_ctrl_c_is_heard_while_a_result_is_waited_for() -> None:
    heard = threading.Event()
    outcomes: list[bool] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def function(item: int) -> int:
        """Send SIGINT until it is handled, because Python may miss a signal just before it begins to wait."""
        for _ in range(40):
            os.kill(os.getpid(), signal.SIGINT)
            if heard.wait(1.5):
                break
        outcomes.append(heard.is_set())
        return item

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(Flow.from_iterable([1]).map(function, threads=1)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcomes == [True]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardprep-map")]


def test_a_pass_that_is_left_begins_no_more_calls_in_its_threads() -> None:
    called = []

    def slow(item: int) -> int:
        called.append(item)
        time.sleep(0.3 if item else 0)
        return item

    next(iter(Flow.from_iterable(range(100)).map(slow, threads=1)))
    assert len(called) < 10  # of the 17 that wait for the thread


def test_what_a_pass_keeps_is_dropped_at_a_close_and_what_it_has_borrowed_at_its_end_or_failure() -> None:
    resources, failed, borrowed = PassResources(), Mock(), Mock()
    with pytest.raises(ValueError, match="no"), resources.borrow("a", lambda: failed):
        raise ValueError("no")
    failed.close.assert_called_once()
    with resources.borrow("b", lambda: borrowed):
        resources.values[(), 1] = "items"
        resources.close()
        borrowed.close.assert_not_called()
    borrowed.close.assert_called_once()
    assert not resources.values


def test_a_group_is_full_at_its_bytes_however_many_items_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_map, "GROUP_BYTES", 2500)
    numbered = ((bytes(1000), number) for number in range(40))
    groups = process_map.ItemGroups(
        numbered, pass_number=0, rows=8, least=2, items_never_change=True, row_form=lambda: None
    )
    groups.delivered = 10**9  # of a fast phase with small items
    assert {len(request.items) for request in groups} <= {1, 2, 3}


PRELUDE = """
import os, sys, threading
from shardprep.loaders import Flow
from shardprep.loaders.flow import map as mapping
mapping.PASS_END_TIMEOUT_S = 0.2
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with scripts(tmp_path, PRELUDE) as start:
        yield start


@pytest.mark.torture
def test_a_program_that_waits_for_a_prefetched_item_hears_ctrl_c(start: Start) -> None:
    program = start("""
def blocked():
    yield 1
    print("blocked", flush=True)
    threading.Event().wait()
for item in Flow.from_callable(blocked).prefetch(2): pass
""")
    assert line_of(program) == "blocked"
    time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    code, said = outcome(program)
    assert said.endswith("KeyboardInterrupt\n")
    assert code == -signal.SIGINT


@pytest.mark.slow
def test_functions_of_a_program_are_sent_by_its_children_too_or_refused_with_the_reason(start: Start) -> None:
    program = start("""
from multiprocessing import get_context
LOCK = threading.Lock()
def locked(item):
    with LOCK: return item
def add(item): return item + 1
def work():
    for function in (add, lambda item: add(item)):
        print(*Flow.from_iterable(range(3)).map(function, processes=1))
if __name__ == "__main__":
    get_context("spawn").Process(target=work).start()
    list(Flow.from_iterable(range(3)).map(locked, processes=1))
""")
    printed, said = program.communicate(timeout=TEST_TIMEOUT_S)
    assert printed == "1 2 3\n1 2 3\n"
    assert "locked cannot be sent to another process (cannot pickle '_thread.lock' object)" in said
    assert "IndexError" not in said


@pytest.mark.slow
@pytest.mark.parametrize("passed", ["flow.prefetch(2)", "flow.map(abs, threads=2)", "QueueInput(flow)"])
def test_a_forked_copy_hears_that_the_pass_is_not_its_own(start: Start, passed: str) -> None:
    if "QueueInput" in passed:
        pytest.importorskip("tensorflow")
    program = start(f"""
import warnings; warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads
{"from shardprep.loaders.tf_inputs import QueueInput" if "Queue" in passed else ""}
flow = Flow.from_iterable(range(1000))
items = iter({passed}); found = [next(items)]
if not os.fork():
    try: next(items)
    except Exception as error: print(type(error).__name__, "forked" in str(error), len(list(flow)), flush=True)
    sys.exit()
print(os.waitstatus_to_exitcode(os.wait()[1]), [*found, *items] == list(range(1000)))
""")
    said = map(without_tensorflow_log, program.communicate(timeout=TEST_TIMEOUT_S))
    assert [*said] == ["UsageError True 1000\n0 True\n", ""]
