"""Flow: any Python data, composed into a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.core.checks import checked_int
from shardprep.loaders.flow.core.node import Node
from shardprep.loaders.flow.core.user_function import Function
from shardprep.loaders.flow.map.components import MapComponent, Select
from shardprep.loaders.flow.map.map import Filter, Map, Transforming
from shardprep.loaders.flow.map.process_map import ProcessMap, declared
from shardprep.loaders.flow.map.thread_map import ThreadMap
from shardprep.loaders.flow.steps.batch import Batch, BatchByShape, Remainder, Unbatch
from shardprep.loaders.flow.steps.cache import Cache
from shardprep.loaders.flow.steps.combine import Concat, Zip
from shardprep.loaders.flow.steps.in_process import InProcess
from shardprep.loaders.flow.steps.mix import Choose, Mix
from shardprep.loaders.flow.steps.prefetch import Prefetch
from shardprep.loaders.flow.steps.print_items import Print
from shardprep.loaders.flow.steps.repeat import Repeat, Take
from shardprep.loaders.flow.steps.shuffle import LocallyShuffled
from shardprep.loaders.flow.steps.weighted_choice import as_weights
from shardprep.loaders.transforms.contract import ArraySpec, Transform

from .flow_sources import FlowSources


class Flow(FlowSources):
    """An immutable description of a pipeline; each step returns a new flow, and iterating it runs one pass.

        train = Flow.from_files("train").shuffle(10_000).map(load, processes=8).batch(256)
        for images, labels in train: ...

    ``node`` is the last node of the pipeline; the class methods make it, users do not pass it.

    The first iteration runs pass 0, the next ones 1, 2, ...; :meth:`at_pass` runs any pass. The items of a
    pass depend on its number, the data and the seeds only, for any number of processes or threads. Random
    values depend on (seed, pass, number of the item, step) only. Several passes of one flow may run at once.

    Worker processes and caches are kept from one pass to the next. Closing or dropping the flow ends them.
    ``len(flow)`` is exact or raises TypeError; :attr:`length` says what is known. A flow is picklable; the
    copy begins at pass 0. One thread at a time may begin passes, and one thread draw from each pass. A step
    that cannot work raises UsageError when it is added.
    """

    # Steps on each item

    def map(
        self,
        function: Callable[..., Any],
        *,
        threads: int = 0,
        processes: int = 0,
        ordered: bool = True,
        drop_none: bool = False,
        random: bool = False,
        seed: int = 0,
        outputs: ArraySpec | Sequence[ArraySpec] | None = None,
        deadline: float | None = None,
    ) -> Flow:
        """``function(item)`` for each item: in the consumer's thread, or in threads, or in worker processes.

        ``threads`` and ``processes`` are how many; give at most one of them. Each item is mapped exactly once
        per pass. Results come in the order of the items; with ``ordered=False`` as soon as they are made. An
        exception of the function is raised after the results before it, with the item's number as a note. A
        result of None raises UsageError; with ``drop_none`` such items are left out, and the length becomes
        an upper bound. With ``random`` the call is ``function(item, rng)``: ``rng`` is a numpy Generator that
        depends on ``seed``, the pass and the item, and is valid during the call only.

        Processes are the loader's workers: a worker that dies is replaced, and its items are mapped again.
        ``deadline`` is the number of seconds after which an item counts as hung; None means no limit. A
        worker has 120 s to start; with a ``deadline`` it has that time, but at least 30 s. Items and results
        pass through shared memory, and arrays are not copied on the way back. ``outputs`` declares the arrays
        that the function returns, one or a tuple: the workers then write the rows of a following ``batch`` in
        place. Lambdas and closures need cloudpickle with processes. Raises UsageError for arguments that
        contradict each other.
        """
        threads, processes = (
            checked_int(threads, "threads", least=0),
            checked_int(processes, "processes", least=0),
        )
        if threads and processes:
            raise UsageError(f"threads={threads}, processes={processes}: give a number for one of them")
        call = Function(function)
        if processes:
            return self._with(
                ProcessMap(
                    self.node,
                    call,
                    processes=processes,
                    ordered=ordered,
                    drop_none=drop_none,
                    random=random,
                    seed=seed,
                    outputs=declared(outputs),
                    is_single=isinstance(outputs, ArraySpec),
                    deadline=deadline,
                )
            )
        if outputs is not None or deadline is not None:
            raise UsageError("outputs and deadline are for a map with processes; give their number")
        if threads:
            return self._with(
                ThreadMap(
                    self.node,
                    call,
                    threads=threads,
                    ordered=ordered,
                    drop_none=drop_none,
                    random=random,
                    seed=seed,
                )
            )
        return self._with(Map(self.node, call, drop_none=drop_none, random=random, seed=seed))

    def transform(self, transform: Transform, *, threads: int = 0, processes: int = 0, seed: int = 0) -> Flow:
        """A loader's ``transform``, such as TrainTransform(224), of each (image, label).

        An item becomes (what the transform returns, label). A dict in place of the image has ``image`` and
        the columns by their names. Items may be such dicts themselves, with ``key`` and ``label``, or
        records. ``threads``, ``processes`` and ``seed`` are as in :meth:`map`. Raises UsageError in a pass
        for other items.
        """
        function = Transforming(transform)
        outputs = function.outputs if processes else None
        return self.map(
            function, threads=threads, processes=processes, random=True, seed=seed, outputs=outputs
        )

    def map_component(
        self, function: Callable[..., Any], component: int | str, *, random: bool = False, seed: int = 0
    ) -> Flow:
        """``function`` of one component of each item; the other components stay as they are.

        ``component`` is its number in tuples and lists, its name in dicts. Each item becomes a new one of the
        same kind. ``random`` and ``seed`` are as in :meth:`map`. Raises UsageError for items without the
        component.
        """
        return self._with(MapComponent(self.node, Function(function), component, random=random, seed=seed))

    def filter(self, predicate: Callable[[Any], Any]) -> Flow:
        """The items for which ``predicate(item)`` is true. The length becomes an upper bound."""
        return self._with(Filter(self.node, Function(predicate)))

    def select(self, *components: int | str) -> Flow:
        """These ``components`` of each item, in this order: numbers give a tuple, names a dict.

        Raises UsageError for a mixture of both, and in a pass for items without such a component.
        """
        return self._with(Select(self.node, components))

    # Steps on the order and number of items

    def shuffle(self, window: int, *, seed: int = 0) -> Flow:
        """Move each item by less than ``window`` places, at random. Every pass has each item once.

        Away from both ends, an item moves by up to half the window in either direction, a quarter on average,
        with a standard deviation of 0.29 windows: a window of 3 n spreads as far as tensorpack's buffer of n.
        Where items can be picked by number (sequences, datasets, files, and maps over those), only numbers
        are shuffled. Otherwise about half a window of items is held in memory.
        """
        return self._with(LocallyShuffled.of(self.node, window, seed))

    def batch(self, size: int, *, remainder: Remainder = "keep", as_list: bool = False) -> Flow:
        """Combine each ``size`` items into one batch: arrays [size, ...], in tuples or dicts like the items.

        ``remainder`` decides about the last items if they are fewer: ``"keep"`` makes a smaller batch,
        ``"drop"`` leaves them out, ``"pad"`` fills the batch with zeros. ``"pad"`` adds a last component to
        every batch (in dicts: ``"mask"``), bool [size], True for real rows. ``as_list`` makes a list of each
        component's values instead of an array; they may have any form. Raises UsageError in a pass where
        items of a batch differ in form, shape or dtype.
        """
        return self._with(Batch.of(self.node, size, remainder=remainder, as_list=as_list))

    def batch_by_shape(self, size: int, *, remainder: Literal["keep", "drop"] = "keep") -> Flow:
        """As :meth:`batch`, but each batch has items of equal shapes. A batch is yielded when it is full.

        Up to ``size`` - 1 items of each shape are held. At the end of a pass, ``remainder`` keeps or drops
        them; kept batches come in the order of their first items.
        """
        return self._with(BatchByShape(self.node, size, remainder))

    def unbatch(self) -> Flow:
        """The rows of each batch, as views of it. The mask of a padded batch stays a component."""
        return self._with(Unbatch(self.node))

    def repeat(self, passes: int | None = None) -> Flow:
        """``passes`` passes in each pass; None repeats without end.

        With n passes, pass p runs the passes p * n to p * n + n - 1 of this flow. Raises UsageError for an
        infinite flow, and for a flow without items that is repeated without end.
        """
        return self._with(Repeat(self.node, passes))

    def take(self, count: int) -> Flow:
        """The first ``count`` items of each pass."""
        return self._with(Take.of(self.node, count))

    def concat(self, *others: Flow) -> Flow:
        """This flow's items, then those of ``others``. UsageError if a flow before the last is infinite."""
        return self._with(Concat(self._nodes(others)))

    def zip(self, *others: Flow) -> Flow:
        """One item of this flow and of each of ``others`` as one item, until one of the flows ends.

        Dicts are joined into one dict; any other items become one tuple, in which tuples and lists are
        flattened. Raises UsageError in a pass where two dicts have a name in common.
        """
        return self._with(Zip(self._nodes(others)))

    def mix(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """Every item of this flow and of ``others``, interleaved at random; each flow's items stay in order.

        ``weights``, one for each flow, are the probabilities of the next item's flow, up to a factor. Without
        them the probability is the number of items that a flow has left, which needs exact lengths. Raises
        UsageError for weights that are not positive, and for lengths that are not exact where there are no
        weights.
        """
        return self._with(Mix(self._nodes(others), as_weights(weights), seed))

    def choose(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """Items of flows that are drawn at random: this flow and ``others``, by ``weights`` or evenly.

        The pass ends when the flow that is drawn has no more items. Raises UsageError for negative weights.
        """
        return self._with(Choose(self._nodes(others), as_weights(weights), seed))

    # Steps on how a pass runs

    def cache(self) -> Flow:
        """Keep the items of the first complete pass in memory, and yield them read-only in every later pass.

        A pass that is closed early keeps nothing. Random steps before this one run only in the kept pass.
        Raises UsageError for an infinite flow.
        """
        return self._with(Cache(self.node))

    def prefetch(self, items: int = 2) -> Flow:
        """Run all steps before this one in a thread, at most ``items`` items ahead."""
        return self._with(Prefetch(self.node, items))

    def in_process(self, *, ahead: int = 64) -> Flow:
        """Run all steps before this one in another process, at most max(``ahead``, 4) items ahead.
        If that process is killed, a new one runs the pass again and continues at the same item. After a pass
        was closed early, its source stays open until the next pass begins or the flow is closed. Lambdas and
        closures need cloudpickle. Raises UsageError for steps with processes and for caches before this step.
        """
        return self._with(InProcess(self.node, ahead))

    def print(self, items: int = 1) -> Flow:
        """Print the types, shapes, dtypes and ranges of the first ``items`` items of each pass to stderr."""
        return self._with(Print(self.node, items))

    def _with(self, node: Node) -> Flow:
        return Flow(node)

    def _nodes(self, others: Sequence[Flow]) -> tuple[Node, ...]:
        if not all(isinstance(other, Flow) for other in others):
            raise UsageError("only flows can be combined; make one with Flow.from_iterable")
        return (self.node, *(other.node for other in others))
