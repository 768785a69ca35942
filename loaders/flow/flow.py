"""Flow: any Python data, composed into a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from ...formats.errors import UsageError
from ..order import Shuffle
from ..transforms import ArraySpec, Transform
from . import sources
from .batch import Batch, BatchByShape, Remainder, Unbatch
from .cache import Cache
from .combine import Choose, Concat, Mix, Zip
from .components import MapComponent, Select
from .dataset import FromDataset
from .fake import FromFakeData
from .files import FromFiles
from .functions import Function
from .in_process import InProcess
from .look import Print
from .lots import given
from .map import Filter, Map
from .node import Node
from .pipeline import Pipeline
from .prefetch import Prefetch
from .process_map import ProcessMap, declared
from .repeat import Repeat, Take
from .shuffle import LocallyShuffled
from .thread_map import ThreadMap
from .transforming import Transforming
from .whole import whole


class Flow(Pipeline):
    """An immutable description of a pipeline; each step returns a new one, and iterating it runs one pass.

        train = Flow.from_files("train").shuffle(10_000).map(load, processes=8).batch(256)
        for images, labels in train: ...

    Iterating runs pass 0 first, then 1, 2, ...: every pass is a function of its number, the data and the seeds,
    whatever the number of processes or threads; :meth:`at_pass` runs any of them. What is drawn at random depends
    on (seed, pass, number of the item, step) and on nothing else. Several passes of one flow may run at once.

    Worker processes and caches are kept from one pass to the next: close the flow, or drop it, to end them.
    ``len(flow)`` is exact or raises TypeError; :attr:`length` says what is known. Picklable; the copy begins at
    pass 0. One thread at a time may begin passes, and one draw from each. Raises UsageError for what a step cannot do, when the step is added.
    """

    # Sources

    @classmethod
    def from_iterable(cls, items: Iterable[Any]) -> Flow:
        """The items, once per pass. A sequence (``len`` and ``[]``) can be shuffled and shared by number.

        An iterator, which has but one pass, raises UsageError: use :meth:`from_callable`.
        """
        return cls(sources.from_iterable(items))

    @classmethod
    def from_callable(cls, begin: Callable[[], Iterable[Any]]) -> Flow:
        """What ``begin()`` returns, called anew for each pass; a generator function will do. Length unknown."""
        return cls(sources.FromCallable(Function(begin)))

    @classmethod
    def from_dataset(
        cls,
        path: str | os.PathLike[str],
        *,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        labels: str = "sorted_wnid0",
        with_keys: bool = False,
    ) -> Flow:
        """A converted dataset's records as (image, label): encoded bytes and int; (key, image, label) with keys.

        ``shuffle`` is as for :class:`.Loader`, and pass n has the order of its epoch n. Records are checked
        against their CRC-32C: raises CorruptRecord, ShardDamaged. A ``map`` with processes reads in its workers.
        """
        return cls(FromDataset.of(path, shuffle=shuffle, seed=seed, label_space=labels, with_keys=with_keys))

    @classmethod
    def from_files(
        cls, folder: str | os.PathLike[str], *, suffixes: Sequence[str] | None = None, seed: int | None = None
    ) -> Flow:
        """The files of FOLDER/CLASS/... as (bytes, label), label being the class folder's place in sorted order.

        Files come in sorted order, or with ``seed`` in a new random order in each pass, all read one by one: what
        shards are faster than. ``suffixes`` default to those of images. A ``map`` with processes reads in its
        workers. Raises UsageError for a folder without such files or with some outside of its class folders, and
        SourceDamaged for symbolic links in it.
        """
        return cls(FromFiles.of(folder, suffixes=suffixes, seed=seed))

    @classmethod
    def fake(
        cls,
        items: int,
        *,
        size: tuple[int, int] = (224, 224),
        encoded: bool = False,
        seconds: float = 0.0,
        seed: int = 0,
    ) -> Flow:
        """``items`` made-up (image, label): uint8 [H, W, 3] of noise, or bytes of real JPEG files; int labels.

        As :class:`.FakeData`: read-only, few different ones, each costing ``seconds``.
        """
        return cls(FromFakeData.of(items, size=size, encoded=encoded, seconds=seconds, seed=seed))

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
        """``function(item)`` for each item, here, in so many threads, or in so many processes.

        Each item exactly once per pass, in order; ``ordered=False`` yields results as they come. An exception is
        raised here, with the item's number as a note, after the results before it. A result of None raises
        UsageError unless ``drop_none``, which leaves such items out, and the length at most what it was. With
        ``random`` the function is called with ``(item, rng)``, a numpy Generator for this item of this pass, good
        only during the call.

        Processes are the loader's workers: who dies is replaced and its items done again; ``deadline`` is the
        number of seconds after which an item counts as hung. Items and results travel through shared memory,
        arrays without a copy on the way back. ``outputs`` declares the arrays that the function returns (one, or a tuple): a
        following ``batch`` is then written by the workers, and copied by nobody. Lambdas and closures need
        cloudpickle where there are processes.
        """
        threads, processes = whole(threads, "threads", least=0), whole(processes, "processes", least=0)
        if threads and processes:
            raise UsageError(f"threads={threads}, processes={processes}: give a number for one of them")
        call = Function(function)
        if processes:
            return self._with(
                ProcessMap(
                    self._node,
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
                    self._node,
                    call,
                    threads=threads,
                    ordered=ordered,
                    drop_none=drop_none,
                    random=random,
                    seed=seed,
                )
            )
        return self._with(Map(self._node, call, drop_none=drop_none, random=random, seed=seed))

    def transform(self, transform: Transform, *, threads: int = 0, processes: int = 0, seed: int = 0) -> Flow:
        """(image, label) made (what a loader's transform returns, label), as by :meth:`map`; TrainTransform(224), say."""
        function = Transforming(transform)
        outputs = function.outputs if processes else None
        return self.map(
            function, threads=threads, processes=processes, random=True, seed=seed, outputs=outputs
        )

    def map_component(
        self, function: Callable[..., Any], component: int | str, *, random: bool = False, seed: int = 0
    ) -> Flow:
        """``function`` of one component of each item, the ``component``-th or that of the name; the others stay.

        Items are tuples, lists or dicts, of which new ones are made; what ``random`` means is as in :meth:`map`.
        """
        return self._with(MapComponent(self._node, Function(function), component, random=random, seed=seed))

    def filter(self, predicate: Callable[[Any], Any]) -> Flow:
        """The items for which ``predicate(item)`` is true; the length becomes at most what it was."""
        return self._with(Filter(self._node, Function(predicate)))

    def select(self, *components: int | str) -> Flow:
        """These components of each item, in this order: a tuple of those with the numbers, a dict of those with the names."""
        return self._with(Select(self._node, components))

    # Steps on the order and number of items

    def shuffle(self, window: int, *, seed: int = 0) -> Flow:
        """Each item moves by less than ``window`` places, at random; all of them come, once, in every pass.

        Where items can be had by number (sequences, datasets, files, and maps over those) only numbers are
        shuffled; otherwise about half a window of items is held.
        """
        return self._with(LocallyShuffled.of(self._node, window, seed))

    def batch(self, size: int, *, remainder: Remainder = "keep", as_list: bool = False) -> Flow:
        """Each ``size`` items as one: arrays with a first axis more, in tuples or dicts like the items.

        ``remainder`` says what becomes of the last items: ``"keep"`` a smaller batch, ``"drop"`` them, or ``"pad"``
        the batch with zeros, and add to every batch a last component (in dicts: ``"mask"``), bool [size], that is
        True for real rows. ``as_list`` keeps each component's items in a list instead, of any form. Raises
        UsageError where items of a batch differ in form, shape or dtype.
        """
        return self._with(Batch.of(self._node, size, remainder=remainder, as_list=as_list))

    def batch_by_shape(self, size: int, *, remainder: Literal["keep", "drop"] = "keep") -> Flow:
        """As :meth:`batch`, of items whose arrays have the same shapes, in the order in which batches fill.

        At most ``size`` - 1 items of each shape wait; at the end they come in the order of their first items.
        """
        return self._with(BatchByShape(self._node, size, remainder))

    def unbatch(self) -> Flow:
        """The rows of each batch, one by one: views of it. Masks of padded batches are left where they are."""
        return self._with(Unbatch(self._node))

    def repeat(self, passes: int | None = None) -> Flow:
        """So many passes in each pass, or endless ones: pass p runs through the passes p * n to p * n + n - 1."""
        return self._with(Repeat(self._node, passes))

    def take(self, count: int) -> Flow:
        """The first ``count`` items of each pass."""
        return self._with(Take.of(self._node, count))

    def concat(self, *others: Flow) -> Flow:
        """This flow's items, then those of the others."""
        return self._with(Concat(self._nodes(others)))

    def zip(self, *others: Flow) -> Flow:
        """Tuples of one item of each flow, until one of them ends. Tuples and lists are joined into one tuple, dicts into one dict."""
        return self._with(Zip(self._nodes(others)))

    def mix(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """Every item of every flow, interleaved at random until all have ended, each flow's in order.

        The next flow is drawn by ``weights``, or by how much each has left, which needs exact lengths.
        """
        return self._with(Mix(self._nodes(others), given(weights), seed))

    def choose(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """An item of a flow drawn at random each time, by ``weights`` or evenly, until one that is drawn has ended."""
        return self._with(Choose(self._nodes(others), given(weights), seed))

    # Steps on how a pass runs

    def cache(self) -> Flow:
        """The items of the first complete pass, kept in memory and yielded again in each later one, read-only.

        A pass that is left early keeps nothing. Randomness before this step is drawn once.
        """
        return self._with(Cache(self._node))

    def prefetch(self, items: int = 2) -> Flow:
        """Everything up to here runs in a thread, at most so many items ahead."""
        return self._with(Prefetch(self._node, items))

    def in_process(self, *, ahead: int = 64) -> Flow:
        """Everything up to here runs in one other process, at most ``ahead`` items ahead, or 4, in order.

        Where that process is killed, another one begins the pass again and goes on where it was. Steps with
        processes of their own, and caches, raise UsageError. A pass that is left early keeps what its source holds
        until the next one begins or the flow is closed. Lambdas and closures need cloudpickle.
        """
        return self._with(InProcess(self._node, ahead))

    def print(self, items: int = 1) -> Flow:
        """Print to stderr what the first items of each pass look like: types, shapes, dtypes, ranges."""
        return self._with(Print(self._node, items))

    def _with(self, node: Node) -> Flow:
        return Flow(node)

    def _nodes(self, others: Sequence[Flow]) -> tuple[Node, ...]:
        if not all(isinstance(other, Flow) for other in others):
            raise UsageError("only flows can be combined; make one with Flow.from_iterable")
        return (self._node, *(other._node for other in others))
