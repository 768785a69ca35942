"""Maps and whole passes in processes: exact, in order, for any number of workers, also if workers die."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import torture_except

from shardprep.formats.errors import OperationError, UsageError, WorkerDied
from shardprep.loaders.engine.protocol.worker_errors import WorkFailed
from shardprep.loaders.flow.core import user_function
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.map.item_groups import GROUP_BYTES
from shardprep.loaders.transforms.contract import ArraySpec

IMAGE = ArraySpec("image", (4, 5), "float32")
NUMBER = ArraySpec("number", (), "int64")

slow_examples = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def square(x: int) -> int:
    return x * x


def noisy(x: int, rng: np.random.Generator) -> tuple[int, int]:
    return x, int(rng.integers(1 << 40))


def image_of(x: int) -> tuple[np.ndarray[Any, Any], np.int64]:
    return np.full((4, 5), x, np.float32), np.int64(x)


def numbers(count: int) -> Flow:
    return Flow.from_iterable(range(count))


def drawn(flow: Flow) -> tuple[list[Any], Exception | None]:
    """The items of a pass until its end, and its exception."""
    found = []
    try:
        for item in flow:
            found.append(item)
    except Exception as error:
        return found, error
    return found, None


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([1, 4], 4))
def test_any_number_of_workers_gives_the_same_items_in_order(workers: int) -> None:
    with numbers(300).map(noisy, processes=workers, random=True, seed=3) as flow:
        assert [list(flow.at_pass(n)) for n in (0, 1)] == [
            list(numbers(300).map(noisy, random=True, seed=3).at_pass(n)) for n in (0, 1)
        ]


def test_lambdas_closures_and_any_values_go_both_ways() -> None:
    values = [
        None,
        b"bytes",
        b"",
        np.zeros((0, 3)),
        np.zeros(2, "V0"),
        np.array(5, ">i4"),
        np.ma.array([1, 2], mask=[False, True]),
        np.zeros(2, [("a", "f4"), ("b", "i8")]),
        np.array(["2020-01-01"], "M8[ns]"),
        np.array([1, None], object),
        bytearray(b"x"),
        "text",
        {1: np.arange(3)},
        (1, [np.ones(2)]),
        np.float32(3),
        1 << 80,
    ]
    extra = object
    items = [(value, wrapped) for wrapped in (True, False) for value in values[not wrapped :]]
    with Flow.from_iterable(items).map(
        lambda item: (item[0], type(item[0]) is extra) if item[1] else item[0], processes=1
    ) as flow:
        found = list(flow)

    np.testing.assert_equal([x for x, _ in found[: len(values)]], values)
    np.testing.assert_equal(found[len(values) :], values[1:])
    assert [type(x) for x in found[len(values) :]] == [type(x) for x in values[1:]]


@pytest.mark.torture
def test_without_cloudpickle_a_lambda_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_function, "can_dump_by_value", lambda: False)

    with pytest.raises(UsageError, match=r"pip install 'shardprep\[cloudpickle\]', define it"):
        list(numbers(3).map(lambda x: x, processes=1))
    with numbers(3).map(square, processes=1) as flow:
        assert list(flow) == [0, 1, 4]


@pytest.mark.torture
def test_an_item_that_kills_every_worker_is_named() -> None:
    with numbers(20).map(lambda x: os._exit(3) if x == 7 else x, processes=1) as flow:
        items = iter(flow)
        assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(WorkerDied, match="item 7 of pass 0"):
            list(items)


@pytest.mark.slow
def test_what_the_source_raises_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(75)
        raise KeyError("gone")

    with Flow.from_callable(source).map(square, processes=1) as flow:
        found, raised = drawn(flow)

    assert found == [x * x for x in range(75)]
    assert isinstance(raised, KeyError)


FAULTS: dict[str, Any] = {
    "exception": (lambda: 1 // 0, ZeroDivisionError, "division"),
    "exit": (sys.exit, WorkFailed, "SystemExit"),
    "interruption": (lambda: exec("raise KeyboardInterrupt"), WorkFailed, "KeyboardInterrupt"),  # noqa: S102
    "end": (lambda: next(iter(())), RuntimeError, "StopIteration"),
    "generator": (lambda: (x for x in ()), UsageError, "generator, cannot be sent from another process"),
    "lock": (threading.Lock, UsageError, "Return what can be pickled, or use threads"),
}


@pytest.mark.slow
def test_whatever_a_function_does_comes_after_the_results_before_it_and_names_its_item() -> None:
    faults = list(FAULTS)
    fault: list[str] = []

    def function(item: tuple[int, str]) -> Any:
        return FAULTS[item[1]][0]() if item[0] == 37 else item[0]

    with Flow.from_callable(lambda: ((x, fault[-1]) for x in range(100))).map(function, processes=1) as flow:
        for name in faults:
            fault.append(name)
            found, raised = drawn(flow)
            told = "\n".join([str(raised), *getattr(raised, "__notes__", [])])

            assert found == list(range(37)), name
            assert isinstance(raised, FAULTS[name][1]), name
            assert FAULTS[name][2] in told
            assert "item 37 of pass" in told
            assert "at map(" in told


@pytest.mark.torture
def test_none_is_refused_unless_it_is_to_be_dropped() -> None:
    with (
        numbers(100).map(lambda x: x if x % 3 else None, processes=1) as flow,
        pytest.raises(UsageError, match="drop_none=True"),
    ):
        list(flow)
    with numbers(100).map(lambda x: x if x % 3 else None, processes=1, drop_none=True) as flow:
        assert list(flow) == [x for x in range(100) if x % 3]
        assert str(flow.length) == "at most 100"


@pytest.mark.torture
@slow_examples
@given(cuts=st.lists(st.integers(0, 150), max_size=4), ordered=st.booleans())
def test_a_full_pass_after_any_that_were_left_early_is_exact(
    shared: dict[bool, Flow], cuts: list[int], ordered: bool
) -> None:
    flow = shared[ordered]
    for cut in cuts:
        for _ in zip(range(cut), flow, strict=False):
            pass
    found = list(flow)

    assert (found if ordered else sorted(found)) == [x * x for x in range(150)]


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Iterator[dict[bool, Flow]]:
    """One flow for all examples of a test."""
    flows = {ordered: numbers(150).map(square, processes=2, ordered=ordered) for ordered in (True, False)}
    yield flows
    for flow in flows.values():
        flow.close()


@pytest.mark.torture
def test_several_passes_at_once_do_not_disturb_each_other() -> None:
    with numbers(100).map(square, processes=1) as flow:
        first, second = iter(flow), iter(flow)
        pairs = list(zip(first, second, strict=True))

    assert pairs == [(x * x, x * x) for x in range(100)]


@pytest.mark.torture
def test_a_flow_that_is_zipped_with_itself_has_workers_of_its_own() -> None:
    mapped = numbers(40).map(square, processes=1)
    with mapped.zip(mapped) as flow:
        assert list(flow) == [(x * x, x * x) for x in range(40)]


@pytest.mark.torture
def test_picked_items_are_those_of_the_pass() -> None:
    """Picking uses other slots than a whole pass that makes batches, before or after it."""
    with numbers(300).map(noisy, processes=1, random=True).batch(100) as flow:
        (picked,) = flow.pick(4, [2])
        whole = list(flow.at_pass(4))

        assert [len(numbers) for numbers, _ in whole] == [100] * 3
        np.testing.assert_equal(picked, whole[2])
        np.testing.assert_equal(list(flow.pick(4, [2, 0, 0])), [whole[2], whole[0], whole[0]])
    assert not numbers(3).map(square, processes=1, ordered=False).can_pick


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [IMAGE, pytest.param((IMAGE, NUMBER), marks=pytest.mark.torture)])
def test_declared_outputs_arrive_in_batches(outputs: Any) -> None:
    single = outputs is IMAGE

    def make(x: int) -> Any:
        return image_of(x)[0] if single else image_of(x)

    with numbers(503).map(make, processes=1, outputs=outputs).batch(25) as flow:
        batches = list(flow)
        assert flow.batches_never_change

    images = [batch if single else batch[0] for batch in batches]
    assert [len(image) for image in images] == [25] * 20 + [3]
    assert np.array_equal(np.concatenate(images)[:, 1, 1], np.arange(503))
    assert all(image.ctypes.data % 64 == 0 for image in images)


MAKERS: list[Callable[[int], Any]] = [
    lambda x: np.full((4, 5), x),
    lambda x: (np.full(3, x, np.float32), x),
    lambda x: {"image": np.full(3, x), "label": np.int32(x), "weight": x / 2},
    lambda x: [True, 1j * x],
    lambda x: np.full(3, x, ">f4") if x % 100 < 50 else np.asfortranarray(np.full((2, 2), x)),
    lambda x: (np.zeros((0, 3)), (np.full(2, x), {"deep": x})),
    lambda x: np.full(3 if x < 600 else 4, x),
]


def made(item: tuple[int, int]) -> Any:
    return MAKERS[item[0]](item[1])


@pytest.mark.torture
def test_workers_learn_the_form_of_batches_and_write_them_as_stacking_would() -> None:
    """Each maker's results twice, with workers that know the form of the maker before."""
    makers: list[int] = []
    items = Flow.from_callable(lambda: ((makers[-1], x) for x in range(1003)))
    serial = items.map(made).batch(10)
    with items.map(made, processes=2).batch(10) as flow:
        for maker in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6):
            makers.append(maker)
            held = list(flow)
            np.testing.assert_equal(held, list(serial))
        assert flow.batches_never_change


@pytest.mark.torture
def test_results_that_change_form_are_batched_until_two_meet_in_one_batch() -> None:
    with numbers(1000).map(MAKERS[6], processes=1).batch(21) as flow:
        found, raised = drawn(flow)

    assert len(found) == 600 // 21
    assert isinstance(raised, UsageError)
    assert "different shapes" in str(raised)


@pytest.mark.torture
def test_rows_that_are_dropped_need_not_fit_together() -> None:
    with numbers(610).map(MAKERS[6], processes=1).batch(599, remainder="drop") as flow:
        assert [batch.shape for batch in flow] == [(599, 3)]


@pytest.mark.torture
def test_declared_outputs_arrive_alone() -> None:
    with numbers(103).map(image_of, processes=1, outputs=(IMAGE, NUMBER)) as flow:
        assert [(item[0][0, 0], int(item[1])) for item in flow] == [(x, x) for x in range(103)]


def test_an_output_of_another_form_than_declared_says_both() -> None:
    with (
        numbers(3).map(lambda x: np.zeros(3), processes=1, outputs=IMAGE) as flow,
        pytest.raises(UsageError, match=r"float64\[3\], where outputs declare float32\[4, 5\]"),
    ):
        list(flow)


def test_a_source_that_refills_its_array_is_copied_in_time() -> None:
    def refilled() -> Iterator[Any]:
        array = np.zeros(1000, np.int64)
        for number in range(300):
            array[:] = number
            yield array

    with Flow.from_callable(refilled).map(
        lambda array: (int(array.min()), int(array.max())), processes=1
    ) as flow:
        assert list(flow) == [(n, n) for n in range(300)]


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

    arrays = [np.full(1, n) for n in range(40)]
    with Flow.from_iterable(arrays).map(spoiling, processes=2) as flow:
        assert list(flow) == list(range(40))


@pytest.mark.torture
def test_slow_items_do_not_pile_up_on_one_worker() -> None:
    def uneven(x: int) -> int:
        time.sleep(0.02 if x % 4 == 0 else 0.0)
        return x

    with numbers(400).map(uneven, processes=4) as flow:
        for _ in flow:  # starts the workers
            break
        ratios = []
        for _ in range(3):
            began = time.perf_counter()
            assert list(flow) == list(range(400))
            ratios.append((time.perf_counter() - began) / (100 * 0.02 / 4))
            if ratios[-1] <= 1.3:
                break

    assert min(ratios) <= 1.3


@pytest.mark.torture
def test_a_slow_source_is_not_waited_for_by_what_it_has_given() -> None:
    def slow() -> Iterator[int]:
        yield from range(3)
        while not seen:
            time.sleep(0.01)
            yield -1

    seen: list[int] = []
    with Flow.from_callable(slow).map(square, processes=1) as flow:
        for item in flow:
            seen.append(item)

    assert seen[:3] == [0, 1, 4]


# In one other process


@pytest.mark.slow
def test_a_pass_in_a_process_is_the_pass() -> None:
    inner = numbers(200).map(noisy, random=True).shuffle(40)
    with inner.in_process() as flow:
        for number in range(3):
            assert list(flow.at_pass(number)) == list(inner.at_pass(number))
        for _ in zip(range(10), flow, strict=False):
            pass
        assert list(flow.at_pass(0)) == list(inner.at_pass(0))


@pytest.mark.slow
def test_a_pass_runs_elsewhere_and_takes_the_item_where_its_process_is_killed() -> None:
    with Flow.from_callable(lambda: ((n, os.getpid()) for n in range(500))).in_process() as flow:
        found = []
        for item in flow:
            found.append(item)
            if len(found) == 100:
                os.kill(item[1], signal.SIGKILL)

    assert [n for n, _ in found] == list(range(500))
    assert len({pid for _, pid in found}) == 2
    assert os.getpid() not in {pid for _, pid in found}


def test_an_exception_in_the_process_comes_after_what_it_had_made() -> None:
    def failing() -> Iterator[int]:
        yield from range(30)
        raise KeyError("gone")

    with Flow.from_callable(failing).in_process(ahead=8) as flow:
        found, raised = drawn(flow)

    assert found == list(range(30))
    assert isinstance(raised, KeyError)
    assert "item 30 of pass 0, in_process()" in str(raised.__notes__)


@pytest.mark.slow
def test_processes_within_a_process_are_refused_when_the_step_is_added() -> None:
    with pytest.raises(UsageError, match="cannot run in another process"):
        numbers(3).map(square, processes=1).batch(2).in_process()
    with numbers(3).map(square, threads=2).in_process() as flow:
        assert list(flow) == [0, 1, 4]


def test_a_cache_cannot_end_with_another_process() -> None:
    """A pass that continues in a new process would continue with other items."""
    with pytest.raises(UsageError, match="put it behind in_process"):
        numbers(3).shuffle(3).cache().take(2).in_process()


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


# What is left


@pytest.mark.torture
def test_a_forked_copy_of_a_flow_has_workers_of_its_own() -> None:
    with numbers(30).map(square, processes=1) as flow:
        list(flow)
        pid = os.fork()
        if not pid:
            with flow:
                os._exit(0 if list(flow) == [x * x for x in range(30)] else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(list(flow)) == 30


@pytest.mark.torture
def test_large_results_take_memory_for_a_group_not_for_all_that_could_be_large() -> None:
    """Results of any size pass through shared memory, and groups of them stay small."""
    size = 6 << 20
    with numbers(600).map(lambda x: np.full(size, x % 256, np.uint8), processes=1) as flow:
        for number, array in enumerate(flow):
            assert array[0] == array[-1] == number % 256
            assert array.base is not None
            del array
        (engine,) = flow._kept._idle[(os.getpid(), (((), 1), 64))]
        assert os.fstat(engine._ring._file.fileno()).st_blocks * 512 <= 9 * (GROUP_BYTES + size)


def test_too_little_address_space_is_said_to_be_that() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, limits[1]))
    try:
        with pytest.raises(OperationError, match="ulimit -v"):
            next(iter(numbers(3).map(square, processes=1)))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.torture
def test_closing_a_flow_ends_its_workers_and_another_pass_begins_new_ones() -> None:
    flow = numbers(30).map(square, processes=1)
    for _ in range(2):
        assert len(list(flow)) == 30
        assert len(multiprocessing.active_children()) == 1
        flow.close()
        assert not multiprocessing.active_children()


@pytest.mark.torture
def test_a_copy_of_a_flow_runs_as_it_did() -> None:
    flow = numbers(30).map(noisy, processes=1, random=True).batch(4)
    with pickle.loads(pickle.dumps(flow)) as copy:  # noqa: S301
        np.testing.assert_equal(list(copy), list(numbers(30).map(noisy, random=True).batch(4)))


SCRIPT = """
from shardprep.loaders.flow.flow import Flow

class Point:
    def __init__(self, x): self.x = x

def double(point): return Point(2 * point.x)

print("begun")
flow = Flow.from_iterable([Point(1), Point(2)]).map(double, processes=1)
print([point.x for point in flow])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", torture_except(["a script", "standard input"], "standard input"))
def test_a_script_without_a_main_guard_needs_none(tmp_path: Path, how: str) -> None:
    """Functions and classes of the script are sent by value, so no worker runs the script again."""
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = [sys.executable] + ([str(tmp_path / "script.py")] if how == "a script" else ["-"])
    done = subprocess.run(arguments, input=SCRIPT, capture_output=True, text=True, timeout=60)

    assert done.stdout == "begun\n[2, 4]\n"
    assert done.stderr == ""
