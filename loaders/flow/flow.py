"""Flow: any Python data, composed into a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.sizes import checked_int, seed_of
from shardprep.loaders.batches.stack import Padding
from shardprep.loaders.flow.combine import Choose, Concat, Mix, Zip, as_weights
from shardprep.loaders.flow.dataset_source import FromDataset
from shardprep.loaders.flow.map import Filter, Map, MapComponent, Prefetch, Select, ThreadMap, Transforming
from shardprep.loaders.flow.node import Node, checked_seconds, has
from shardprep.loaders.flow.passes import Function
from shardprep.loaders.flow.pipeline import Pipeline
from shardprep.loaders.flow.process_map import InProcess, ProcessMap, declared
from shardprep.loaders.flow.sources import FromCallable, FromFakeData, FromFiles, FromParts, from_iterable
from shardprep.loaders.flow.steps import (
    Batch,
    BatchByShape,
    Cache,
    LocallyShuffled,
    Print,
    Remainder,
    Repeat,
    Skip,
    Take,
    Unbatch,
)
from shardprep.loaders.loader.fake import FakeData
from shardprep.loaders.order.epoch import Shuffle
from shardprep.loaders.transforms.contract import ArraySpec, Transform


class Flow(Pipeline):
    """An immutable description of a pipeline; each step returns a new flow, and iterating it runs one pass.

        train = Flow.from_files("train").shuffle(10_000).map(load, processes=8).batch(256)
        for images, labels in train: ...

    ``node`` is the last node of the pipeline. Use the class methods to make a flow, not the constructor.

    The first iteration runs pass 0, the next ones 1, 2, ...; :meth:`at_pass` runs any pass. The items of a
    pass depend only on its number, the data and the seeds, for any number of processes or threads. Random
    values depend only on (seed, pass, item number, step). Several passes of one flow may run at once.

    Worker processes and caches live from one pass to the next. Closing or dropping the flow ends them.
    ``len(flow)`` is exact or raises TypeError; :attr:`length` tells what is known. A flow is picklable; the
    copy begins at pass 0. Only one thread at a time may begin passes, and only one may draw from each pass.
    A step that cannot work raises UsageError when it is added.
    """

    # Sources

    @classmethod
    def from_iterable(cls, items: Iterable[Any]) -> Self:
        """A flow of the elements of ``items``, each once per pass.

        The items of a sequence (``len`` and ``[]``) can be picked and shuffled by number. Raises UsageError
        for an iterator, because it has only one pass: use :meth:`from_callable`.
        """
        return cls(from_iterable(items))

    @classmethod
    def from_callable(cls, begin: Callable[[], Iterable[Any]]) -> Self:
        """A flow of the items of ``begin()``, which is called once per pass. The length is unknown.

        ``begin`` returns an iterable; a generator function works. Raises UsageError if ``begin`` is not
        callable, and in a pass if its result is not iterable.
        """
        return cls(FromCallable(Function(begin)))

    @classmethod
    def from_parts(cls, make: Callable[[int], Iterable[Any]], *, parts: int) -> Self:
        """A flow of one item from each of ``make(0)``, ..., ``make(parts - 1)`` in turn, until all end.

        ``make(part)`` is called once per pass and returns an iterable, such as a generator. Parts that have
        ended are skipped. If ``make`` returns a Flow, the part is that flow's pass of the same number, with
        its own random values. All ``parts`` are open at the same time. The length is unknown.

        Several machines that :func:`.serve` this flow share the parts of a pass without changing the order:
        each part is made by one of them at a time. Steps after this one run on one machine at a time, so put
        expensive steps (``map``, ``batch``) into ``make``. Raises UsageError for fewer than one part, and in
        a pass if the result of ``make`` is not iterable.
        """
        return cls(FromParts(Function(make), checked_int(parts, "the number of parts", least=1)))

    @classmethod
    def from_dataset(
        cls,
        path: str | os.PathLike[str],
        *,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        labels: str = "sorted_wnid0",
        with_keys: bool = False,
        columns: Sequence[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
    ) -> Self:
        """A flow of the records of a converted dataset at ``path``: (image, label), encoded bytes and int.

        ``with_keys`` makes them (key, image, label). If the dataset has columns, or ``columns`` is given, a
        dict of "image" and the columns takes the image's place. A dataset of saved items yields those items,
        unless ``columns`` is given. ``path``, ``shuffle``, ``seed``, ``labels``, ``columns``, ``cache`` and
        ``cache_limit`` are as for :class:`.Loader`; pass n has the order of the loader's epoch n. A ``map``
        with processes reads in its workers. The shards of a URL are downloaded ahead of a pass.
        Opening the dataset raises ManifestDamaged, UnknownVersion, UsageError, OSError, and for a URL the
        errors of :func:`.open_dataset`. A pass checks each record against its CRC-32C, and raises
        CorruptRecord and ShardDamaged.
        """
        return cls(
            FromDataset.of(
                path,
                shuffle=shuffle,
                seed=seed,
                label_space=labels,
                with_keys=with_keys,
                columns=columns,
                cache=cache,
                cache_limit=cache_limit,
            )
        )

    @classmethod
    def from_files(
        cls,
        folder: str | os.PathLike[str],
        *,
        labels: Mapping[str, int] | Sequence[int] | None = None,
        suffixes: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Self:
        """A flow of the files in ``folder``/CLASS/... as (bytes, label); with ``labels``, of any folder.

        The label is the position of the class folder in sorted order, unless ``labels`` gives the labels by
        path relative to the folder, or as a sequence in the order of the sorted paths. Files come in sorted
        order or, with ``seed``, in a new random order in each pass. Reading single files is slower than
        reading shards. ``suffixes`` defaults to those of images. A ``map`` with processes reads in its
        workers. Raises UsageError if the folder has no such files, if some are outside of its class folders,
        or unless ``labels`` has exactly one label for each file; SourceDamaged for symbolic links.
        """
        return cls(FromFiles.of(folder, suffixes=suffixes, seed=seed, labels=labels))

    @classmethod
    def fake(
        cls,
        items: int,
        *,
        size: tuple[int, int] = (224, 224),
        encoded: bool = False,
        seconds: float = 0.0,
        seed: int = 0,
    ) -> Self:
        """A flow of ``items`` generated (image, label) pairs, without any file.

        An image is noise, uint8 [H, W, 3] with ``size`` (H, W); with ``encoded``, the bytes of a real JPEG
        file. Labels are ints. As in :class:`.FakeData`, images are read-only and repeat after a few different
        ones; each takes ``seconds`` to make. ``seed`` selects the images and labels. Raises UsageError.
        """
        items = checked_int(items, "the number of items", least=0)
        seconds = checked_seconds(seconds, "the time per item")
        data = FakeData(items, batch_size=1, size=size, encoded=encoded, seconds=seconds, seed=seed_of(seed))
        return cls(FromFakeData(data))

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
        """Call ``function`` for each item, in the consumer's thread, in threads or in worker processes.

        Each item is mapped exactly once per pass. An exception in the function is raised after the results
        before it, with the item's number in a note. The function must not write to the item, which may be the
        source's own.

        Processes work like a loader's workers: one that dies is replaced, and its items are mapped again. A
        worker has 120 s to start or, with a ``deadline``, max(deadline, 30 s). Items and results pass
        through shared memory, and arrays are not copied on the way back. With processes, lambdas and closures
        need cloudpickle, and each process has a copy of the function and what it refers to, made when the
        flow's first pass begins: later changes do not reach it before :meth:`close`.

        Args:
            function: Called with an item; returns its result. None is a UsageError unless ``drop_none``.
            threads: Number of threads.
            processes: Number of processes; give threads or processes, not both.
            ordered: Whether results come in the order of the items rather than as soon as they are ready.
            drop_none: Whether to leave out items whose result is None; the length becomes an upper bound.
            random: Whether to call ``function(item, rng)``: ``rng`` is a numpy Generator that depends on
                ``seed``, the pass and the item, and is valid only during the call.
            seed: Seed of ``rng``.
            outputs: Specification of the array that the function returns, or of each in a tuple; the workers
                then write the rows of a following ``batch`` in place.
            deadline: Seconds after which an item counts as hung; None for no limit.

        Raises:
            UsageError: The arguments contradict each other.
        """
        threads = checked_int(threads, "threads", least=0)
        processes = checked_int(processes, "processes", least=0)
        if threads and processes:
            raise UsageError(f"threads={threads}, processes={processes}: give a number for one of them")
        call = Function.of_item(function, random=random)
        options: dict[str, Any] = {"drop_none": drop_none, "random": random, "seed": seed_of(seed)}
        if processes:
            if deadline is not None:
                checked_seconds(deadline, "a deadline", above=0)
            options |= {"processes": processes, "ordered": ordered, "deadline": deadline}
            is_single = isinstance(outputs, ArraySpec)
            return Flow(
                ProcessMap(self.node, call, outputs=declared(outputs), is_single=is_single, **options)
            )
        if outputs is not None or deadline is not None:
            raise UsageError("outputs and deadline are for a map with processes; give their number")
        if threads:
            return Flow(ThreadMap(self.node, call, threads=threads, ordered=ordered, **options))
        return Flow(Map(self.node, call, **options))

    def transform(self, transform: Transform, *, threads: int = 0, processes: int = 0, seed: int = 0) -> Flow:
        """Apply a loader's transform, such as TrainTransform(224), to each (image, label).

        An item becomes (result of the transform, label). In place of the image, an item may have a dict of
        ``image`` and the columns. An item may also be such a dict with ``key`` and ``label``, or a record.

        Args:
            transform: The transform.
            threads: Number of threads, as for :meth:`map`.
            processes: Number of processes, as for :meth:`map`.
            seed: Seed of the transform's random values.

        Raises:
            UsageError: The transform is not one of records. In a pass: an item has a different form.
        """
        function = Transforming(transform)
        outputs = function.outputs  # also checks the transform
        outputs = outputs if processes else None
        return self.map(
            function, threads=threads, processes=processes, random=True, seed=seed, outputs=outputs
        )

    def map_component(
        self, function: Callable[..., Any], component: int | str, *, random: bool = False, seed: int = 0
    ) -> Flow:
        """Apply ``function`` to one component of each item and keep the others.

        ``component`` is a number for tuples and lists, a name for dicts. Each item becomes a new one of the
        same kind. ``random`` and ``seed`` are as in :meth:`map`. Raises UsageError for items without the
        component.
        """
        call = Function.of_item(function, random=random)
        return Flow(MapComponent(self.node, call, component, random=random, seed=seed))

    def filter(self, predicate: Callable[[Any], Any]) -> Flow:
        """Keep the items for which ``predicate(item)`` is true. The length becomes an upper bound."""
        return Flow(Filter(self.node, Function(predicate)))

    def select(self, *components: int | str) -> Flow:
        """Keep ``components`` of each item, in this order: numbers give a tuple, names a dict.

        Raises UsageError for a mixture of both, and in a pass for items without such a component.
        """
        return Flow(Select(self.node, components))

    # Steps on the order and number of items

    def shuffle(self, window: int, *, seed: int = 0) -> Flow:
        """Move each item by less than ``window`` places, at random. Every pass has each item once.

        Away from both ends, an item moves by up to half the window in either direction, a quarter on average,
        with a standard deviation of 0.29 windows: a window of 3 n spreads as far as tensorpack's buffer of n.
        If items can be picked by number (sequences, datasets, files, and maps over those), only numbers are
        shuffled. Otherwise about half a window of items is held in memory.
        """
        return Flow(
            LocallyShuffled(self.node, checked_int(window, "a shuffle window", least=1), seed_of(seed))
        )

    def batch(self, size: int, *, remainder: Remainder = "keep", as_list: bool = False) -> Flow:
        """Combine each ``size`` items into one batch: arrays [size, ...], in tuples or dicts like the items.

        Args:
            size: Items per batch.
            remainder: What to do with fewer than ``size`` last items: "keep" makes a smaller batch, "drop"
                leaves them out, "pad" fills the batch with zeros and adds a last component to every batch (in
                dicts: "mask"), bool [size], True for real rows.
            as_list: Whether to make a list of each component's values, of any form, rather than an array.

        Raises:
            UsageError: In a pass: items of a batch differ in form, shape or dtype.
        """
        return Flow(Batch(self.node, checked_int(size, "a batch size", least=1), remainder, as_list))

    def batch_by_shape(self, size: int, *, remainder: Literal["keep", "drop"] = "keep") -> Flow:
        """Like :meth:`batch`, but each batch has items of equal shapes, and is yielded when it is full.

        Up to ``size`` - 1 items of each shape are held. At the end of a pass, ``remainder`` keeps or drops
        them; kept batches come in the order of their first items.
        """
        return Flow(BatchByShape(self.node, checked_int(size, "a batch size", least=1), remainder))

    def pad(self, value: complex = 0) -> Flow:
        """Pad the arrays of each list of a batch to the largest of them, and stack them.

        For batches of lists (``batch(n, as_list=True)``): a list of arrays with the same dtype and number of
        dimensions becomes one array, filled up with ``value``. Lists of numbers become arrays; lists of
        anything else stay lists. Raises UsageError in a pass for arrays that differ in dtype or dimensions,
        and for a value that their dtype cannot hold.
        """
        return self.map(Padding(value))

    def unbatch(self) -> Flow:
        """Yield the rows of each batch, as views of it. The mask of a padded batch stays a component."""
        return Flow(Unbatch(self.node))

    def repeat(self, passes: int | None = None) -> Flow:
        """Run ``passes`` passes in each pass; None repeats forever.

        With n passes, pass p runs the passes p * n to p * n + n - 1 of this flow. Raises UsageError for an
        infinite flow, and for repeating an empty flow forever.
        """
        number = None if passes is None else checked_int(passes, "the number of passes", least=0)
        return Flow(Repeat(self.node, number))

    def take(self, count: int) -> Flow:
        """Keep the first ``count`` items of each pass."""
        return Flow(Take(self.node, checked_int(count, "the number of items to take", least=0)))

    def skip(self, count: int) -> Flow:
        """Leave out the first ``count`` items of each pass, without making them if items have numbers."""
        return Flow(Skip(self.node, checked_int(count, "the number of items to skip", least=0)))

    def concat(self, *others: Flow) -> Flow:
        """Append the items of ``others``. Raises UsageError if a flow before the last is infinite."""
        return Flow(Concat(self._nodes(others)))

    def zip(self, *others: Flow) -> Flow:
        """Join one item from this flow and from each of ``others`` into one, until one of the flows ends.

        Dicts are merged into one dict; any other items become one tuple, into which tuples and lists are
        flattened. Flows that were shuffled before come in different orders, even with one seed: zip, then
        shuffle. Raises UsageError in a pass if two dicts share a name.
        """
        return Flow(Zip(self._nodes(others)))

    def mix(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """Interleave every item of this flow and of ``others`` at random; each flow's items stay in order.

        Args:
            others: The other flows.
            weights: Relative probabilities that the next item comes from each flow. None weights each flow by
                its number of remaining items, which needs exact lengths.
            seed: Seed of the choice.

        Raises:
            UsageError: Weights are not positive, or are missing while lengths are not exact.
        """
        return Flow(Mix(self._nodes(others), as_weights(weights), seed))

    def choose(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """Take each item from this flow or one of ``others``, chosen at random, by ``weights`` or evenly.

        The pass ends when the chosen flow has no more items. Raises UsageError for negative weights.
        """
        return Flow(Choose(self._nodes(others), as_weights(weights), seed))

    # Steps on how a pass runs

    def cache(self) -> Flow:
        """Keep the items of the first complete pass in memory, and yield them read-only in every later pass.

        A pass that is closed early keeps nothing. Random steps before this one run only in that first pass.
        Raises UsageError for an infinite flow.
        """
        return Flow(Cache(self.node))

    def prefetch(self, items: int = 2) -> Flow:
        """Run all steps before this one in a thread, at most ``items`` items ahead."""
        return Flow(Prefetch(self.node, checked_int(items, "the number of items to prefetch", least=1)))

    def in_process(self, *, ahead: int = 64) -> Flow:
        """Run all steps before this one in another process, at most max(``ahead``, 4) items ahead.

        If that process is killed, a new one runs the pass again and continues at the same item. When a pass
        is closed early, its source stays open until the next pass begins or the flow is closed. Lambdas and
        closures need cloudpickle. Raises UsageError if there are steps with processes or caches before it.
        """
        if has(self.node, ProcessMap | InProcess):
            raise UsageError("a step with processes cannot run in another process; leave out in_process()")
        if has(self.node, Cache):  # the cache would be lost with the process
            raise UsageError("a cache() cannot be kept in another process; put it behind in_process()")
        return Flow(InProcess(self.node, checked_int(ahead, "the number of items to run ahead", least=1)))

    def print(self, items: int = 1) -> Flow:
        """Print the types, shapes, dtypes and ranges of the first ``items`` items of each pass to stderr."""
        return Flow(Print(self.node, checked_int(items, "the number of items to print", least=0)))

    def _nodes(self, others: Sequence[Flow]) -> tuple[Node, ...]:
        if not all(isinstance(other, Flow) for other in others):
            raise UsageError("only flows can be combined; make one with Flow.from_iterable")
        return (self.node, *(other.node for other in others))
