"""Functions of each item, or of some of its components, in one thread or several; and prefetching."""

from __future__ import annotations

import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import count
from operator import is_not
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import Any, SupportsIndex

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.records.record import UNLABELLED, ColumnRecord, Record
from shardprep.formats.records.schema import RESERVED, is_integer
from shardprep.formats.runtime.owners import Owner, cached_property
from shardprep.formats.runtime.progress import check_flags, check_seed
from shardprep.loaders.batches.passes import end_pass, ending
from shardprep.loaders.flow.node import Function, Length, Node, PassContext, PickableStep, Step
from shardprep.loaders.loader.stats import GroupTimes
from shardprep.loaders.transforms.contract import ArraySpec, Transform, outputs_of


class ItemStep(PickableStep):
    """A step that makes each result from one item."""

    makes_batches = False

    @abstractmethod
    def result(self, ctx: PassContext, item: Any, number: int) -> Any:
        """The result for the item with this number in this pass."""

    def filter_results(self, results: Iterator[Any]) -> Iterator[Any]:
        """Return the results to yield: all of them."""
        return results

    @property
    def items_never_change(self) -> bool:
        return False  # the function may keep its result, and write to it

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        """Yield the results of all items, or of those with these numbers, without keeping references."""
        items, places = self.number_items(ctx, numbers)
        result = ctx.times.track(self.label, ctx.annotate_errors(self.label, partial(self.result, ctx)))
        with ending(items):
            # a for loop would keep a reference to the item
            yield from self.filter_results(map(result, items, places))


@dataclass(frozen=True)
class Map(ItemStep):
    """``function(item)`` or, with ``random``, ``function(item, rng)``, called when an item is asked for."""

    source: Node
    function: Function
    _: KW_ONLY
    drop_none: bool
    random: bool
    seed: int
    ordered: bool = True

    title = "map({0.function.name})"
    facts = "drop_none={0.drop_none}, random={0.random}, seed={0.seed}"

    @property
    def length(self) -> Length:
        return self.source.length.filtered() if self.drop_none else self.source.length

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick and self.ordered and not self.drop_none

    def result(self, ctx: PassContext, item: Any, number: int) -> Any:
        """Call the function. Thread-safe if the function is."""
        rng = (ctx.rng(self, self.seed, number),) if self.random else ()
        result = self.function(item, *rng)
        if result is None and not self.drop_none:
            raise UsageError(
                f"{self.function.name} returned None for item {number}: return a value, "
                "or leave such items out with drop_none=True"
            )
        return result

    def filter_results(self, results: Iterator[Any]) -> Iterator[Any]:
        return filter(partial(is_not, None), results) if self.drop_none else results


@dataclass(frozen=True)
class Filter(Step):
    """The items for which ``function(item)`` is true."""

    source: Node
    function: Function

    title = "filter({0.function.name})"

    @property
    def length(self) -> Length:
        return self.source.length.filtered()

    def run(self, ctx: PassContext) -> Iterator[Any]:
        items, numbers = self.source.run(ctx.for_source(self)), count()
        is_wanted = ctx.annotate_errors(self.label, lambda item, _: bool(self.function(item)))
        with ending(items):
            yield from filter(ctx.times.track(self.label, lambda item: is_wanted(item, next(numbers))), items)


LABEL = ArraySpec("label", (), "int64")


@dataclass(frozen=True)
class Transforming:
    """Turns (encoded image, label), or a dict of values, into (result of the transform, label)."""

    transform: Transform

    @property
    def outputs(self) -> tuple[ArraySpec, ...] | None:
        """The specs of a result; None if the transform does not declare its outputs."""
        outputs = outputs_of(self.transform)
        return None if outputs is None else (*outputs, LABEL)

    def __call__(self, item: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        record = _to_record(item)
        result = self.transform(record, rng)
        return (*(result if isinstance(result, tuple) else (result,)), np.int64(record.label))


def _to_record(item: Any) -> Record:
    if isinstance(item, Record):
        return item
    if isinstance(item, tuple | list) and len(item) == 2:
        image, label = item
        item = (image if isinstance(image, dict) else {"image": image}) | {"label": label}
    if not isinstance(item, dict):
        raise UsageError(f"a transform needs items of (image, label), or dicts, not a {type(item).__name__}")
    label, image = item.get("label", UNLABELLED), item.get("image", b"")
    if not is_integer(label):
        raise UsageError(
            "a transform needs whole numbers as labels; from_dataset(path, columns=...) gives them"
        )
    if not isinstance(image, bytes | bytearray | memoryview):
        raise UsageError(f"a transform needs encoded images, as bytes, not {type(image).__name__}")
    columns = {name: value for name, value in item.items() if name not in RESERVED}
    record = Record(item.get("key", ""), int(label), bytes(image))
    return ColumnRecord.of(record, columns) if columns else record


@dataclass(frozen=True)
class MapComponent(ItemStep):
    """Items with ``component`` replaced by ``function`` of it."""

    source: Node
    function: Function
    component: int | str
    _: KW_ONLY
    random: bool
    seed: int

    title = "map_component({0.function.name}, {0.component!r})"

    def __post_init__(self) -> None:
        _check_component(self.component)
        check_flags(random=self.random)
        check_seed(self.seed)

    def result(self, ctx: PassContext, item: Any, number: int) -> Any:
        value = _get_component(item, self.component, number)
        rng = (ctx.rng(self, self.seed, number),) if self.random else ()
        return _replace_component(item, self.component, self.function(value, *rng))


@dataclass(frozen=True)
class Select(ItemStep):
    """Some components of each item: numbers give a tuple, names a dict."""

    source: Node
    components: tuple[int | str, ...]

    def __post_init__(self) -> None:
        for component in self.components:
            _check_component(component)
        names = {component for component in self.components if isinstance(component, str)}
        if not self.components or (names and len(names) < len(self.components)):
            raise UsageError(f"select takes numbers or names, each once, not {self.components}")

    @cached_property
    def label(self) -> str:
        return f"select({', '.join(map(repr, self.components))})"

    @property
    def items_never_change(self) -> bool:
        return self.source.items_never_change

    def result(self, ctx: PassContext, item: Any, number: int) -> Any:
        values = (_get_component(item, component, number) for component in self.components)
        if isinstance(self.components[0], str):
            return dict(zip(self.components, values, strict=True))
        return tuple(values)


def _check_component(component: object) -> None:
    if isinstance(component, bool) or not isinstance(component, str | SupportsIndex):
        raise UsageError(f"a component is named by its number or its name, not {component!r}")


def _get_component(item: Any, component: Any, number: int) -> Any:
    """Return the item's component; negative numbers count from the end."""
    if not isinstance(item, dict | tuple | list):
        raise UsageError(
            f"item {number} is {type(item).__name__}, and only tuples, lists and dicts have components"
        )
    if component not in (item if isinstance(item, dict) else range(-len(item), len(item))):
        there = f"the names {[*item]}" if isinstance(item, dict) else f"{len(item)}, numbered from 0"
        raise UsageError(f"item {number} has no component {component!r}: it has {there}")
    return item[component]


def _replace_component(item: Any, component: Any, value: Any) -> Any:
    """Return a new item of the same kind with the component replaced."""
    if isinstance(item, dict):
        return item | {component: value}
    if hasattr(item, "_fields"):
        return item._replace(**{item._fields[component]: value})
    parts = list(item)
    parts[component] = value
    return parts if isinstance(item, list) else tuple(parts)


PASS_END_TIMEOUT_S = 5.0  # for a closed pass to wait for its threads

WINDOW = 16  # unfinished items per thread, so that a slow item does not delay the others


class Task:
    """A call ``make(item)`` for a thread, which then puts the task into ``finished``.

    The task has the only reference to the item and, later, to the result.
    """

    def __init__(self, make: Callable[[Any], Any], item: Any, finished: Tasks) -> None:
        self.finished = finished
        self._make = make
        self._content = [item]
        self._errors: list[BaseException] = []
        self.seconds = 0.0

    def run(self) -> bool:
        """Make the call, and return whether it succeeded."""
        began = perf_counter()
        try:
            self._content.append(self._make(self._content.pop()))
        except BaseException as error:  # raised in the consumer
            self._errors.append(error)
        self.seconds, succeeded = perf_counter() - began, not self._errors
        self.finished.put(self)
        return succeeded

    def result(self) -> Any:
        """Return the call's result, or raise its exception. Callable once."""
        if self._errors:
            raise self._errors.pop()  # popped, because the traceback refers to this frame's variables
        return self._content.pop()


Tasks = SimpleQueue[Task]
EndableTasks = SimpleQueue[Task | None]  # None ends the threads


def run_tasks(tasks: EndableTasks) -> None:
    for task in iter(tasks.get, None):
        task.run()
    tasks.put(None)  # for the next thread


class Threads(Owner):
    """``count`` threads of a pass that ``serve`` its ``tasks``, by default with :func:`run_tasks`.

    ``close`` drops pending tasks, and waits at most PASS_END_TIMEOUT_S for the threads: garbage collection
    may call it while this thread holds a lock that one of them waits for. ``serve`` must not refer to this
    object, so that a dropped pass can be collected.
    """

    def __init__(self, count: int, name: str, serve: Callable[[EndableTasks], None] = run_tasks) -> None:
        self.tasks = EndableTasks()
        threads = [
            threading.Thread(target=serve, args=(self.tasks,), name=f"shardprep-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self.close = weakref.finalize(self, _end_threads, self.tasks, threads)
        for thread in threads:
            thread.start()

    def next_task(self, finished: Tasks) -> Task:
        self.refuse_forked("Flow's pass")  # a forked copy has no threads
        return finished.get()


def _end_threads(tasks: EndableTasks, threads: Sequence[threading.Thread]) -> None:
    try:
        with suppress(Empty):
            while True:
                tasks.get_nowait()
    finally:  # even if this is interrupted
        tasks.put(None)
    until = monotonic() + PASS_END_TIMEOUT_S
    for thread in threads:
        # garbage collection may call this in one of the threads
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, until - monotonic()))


@dataclass(frozen=True)
class ThreadMap(Map):
    """Like :class:`.Map`, in several threads. The consumer's thread draws from the source.

    It draws one item per result, and more while no result is ready, up to WINDOW per thread. An exception in
    the source is raised after the results before it.
    """

    _: KW_ONLY
    threads: int

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        items, places = self.number_items(ctx, numbers)
        threads, shared = Threads(self.threads, "map"), Tasks()
        result = ctx.annotate_errors(self.label, partial(self.result, ctx))
        wait = ctx.times.track_waits("starved", threads.next_task)
        times = ctx.meter.groups.setdefault(ctx.key_of(self), GroupTimes(self.label, "thread", self.threads))

        def begin(item: Any, number: int) -> Tasks:
            task = Task(lambda item: result(item, number), item, Tasks() if self.ordered else shared)
            threads.tasks.put(task)
            return task.finished

        def collect(finished: Tasks) -> Any:
            task = wait(finished)
            times.count(self.label, task.seconds)
            return task.result()

        try:
            queues = _draw_ahead(map(begin, items, places), WINDOW * self.threads)
            yield from self.filter_results(map(collect, queues))
        finally:
            threads.close()
            end_pass(items)


def _draw_ahead(queues: Iterator[Tasks], window: int) -> Iterator[Tasks]:
    """Yield the queue to wait for next, beginning further tasks until its own has finished."""
    pending: deque[Tasks] = deque()
    errors: list[Exception] = []
    while True:
        try:
            for queue in queues:
                pending.append(queue)
                if not pending[0].empty() or len(pending) == window:
                    break
            else:
                queues = iter(())
        except Exception as error:
            queues, errors = iter(()), [error]
        if not pending:
            break
        yield pending.popleft()
    if errors:
        raise errors.pop()


@dataclass(frozen=True)
class Prefetch(PickableStep):
    """Runs the source in a thread, at most ``items`` items ahead. See :meth:`.Flow.prefetch`."""

    source: Node
    items: int

    title = "prefetch({0.items})"
    facts = ""

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        times = ctx.meter.groups.setdefault(ctx.key_of(self), GroupTimes(self.label, "thread"))
        source_ctx = ctx.for_source(self, group=times)
        items = self.source.run(source_ctx) if numbers is None else self.source.pick(source_ctx, numbers)
        finished = Tasks()

        def serve(tasks: EndableTasks) -> None:
            with ending(items):
                for number, task in enumerate(iter(times.track_waits("blocked", tasks.get), None), 1):
                    if task.run() and number < self.items:
                        tasks.put(Task(next, items, finished))

        with closing(Threads(1, "prefetch", serve)) as thread, suppress(StopIteration):
            wait = ctx.times.track_waits("starved", thread.next_task)
            thread.tasks.put(Task(next, items, finished))
            while True:
                task = wait(finished)
                thread.tasks.put(Task(next, items, finished))
                yield task.result()
