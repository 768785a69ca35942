"""Flow: any Python data, composed into a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

from shardprep.formats.errors import UsageError
from shardprep.loaders.batches.stack import Padding
from shardprep.loaders.flow.combine import Choose, Concat, Mix, Zip, as_weights
from shardprep.loaders.flow.dataset_source import FromDataset
from shardprep.loaders.flow.map import Filter, Map, MapComponent, Select, Transforming
from shardprep.loaders.flow.node import Node, checked_int, checked_seconds, has, seed_of
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
from shardprep.loaders.flow.threads import Prefetch, ThreadMap
from shardprep.loaders.loader.fake import FakeData
from shardprep.loaders.order.epoch_order import Shuffle
from shardprep.loaders.transforms.contract import ArraySpec, Transform


class Flow(Pipeline):
    """An immutable description of a pipeline; each step returns a new flow, and iterating it runs one pass.

        train = Flow.from_files("train").shuffle(10_000).map(load, processes=8).batch(256)
        for images, labels in train: ...

    ``node`` is the last node of the pipeline; the class methods make it, users do not pass it.

    The first iteration runs pass 0, the next ones 1, 2, ...; :meth:`at_pass` runs any pass. The items of a
    pass depend on its number, the data and the seeds only, for any number of processes or threads. Random
    values depend on (seed, pass, number of the item, step) only. Several passes of one flow may run at once.

    Worker processes and caches are kept from one pass to the next. Closing or dropping the flow ends them.
    ``len(flow)`` is exact or raises TypeError; :attr:`length` tells how much is known. A flow is picklable;
    its copy begins at pass 0. One thread at a time may begin passes, and one thread draw from each pass. A
    step that cannot work raises UsageError when it is added.
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
        """A flow of the items of ``begin()``, which is called for each pass. The length is unknown.

        ``begin`` returns an iterable; a generator function works. Raises UsageError for an object that cannot
        be called, and in a pass for a result without items.
        """
        return cls(FromCallable(Function(begin)))

    @classmethod
    def from_parts(cls, make: Callable[[int], Iterable[Any]], *, parts: int) -> Self:
        """A flow of one item of ``make(0)``, ..., ``make(parts - 1)`` each in turn, until all have ended.

        ``make(part)`` is called for each pass and returns an iterable of its own, such as a generator. A part
        that has ended is left out of the turn. If ``make`` returns a Flow, the part has that flow's pass of
        the same number, with random values of its own. All parts are open at the same time; ``parts`` is how
        many there are. The length is unknown.

        Several machines that :func:`.serve` this flow share the parts of a pass, and the order is the same:
        each part is made by one of them at a time. Steps after this one are made by one machine at a time, so
        what takes the time (``map``, ``batch``) belongs into ``make``. Raises UsageError for fewer than one
        part, and in a pass for a result without items.
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

        ``with_keys`` makes them (key, image, label). Of a dataset with columns, or with ``columns``, a dict
        takes the image's place, of the columns' values and "image". A dataset of saved items yields these,
        unless ``columns`` are named. ``path``, ``shuffle``, ``seed``, ``labels``, ``columns``, ``cache`` and
        ``cache_limit`` are as for :class:`.Loader`; pass n has the order of the loader's epoch n. A ``map``
        with processes reads in its workers. The shards of a URL are downloaded ahead of a pass.
        Raises ManifestDamaged, UnknownVersion, UsageError, what :func:`.open_dataset` does for a URL, and
        OSError when the dataset is opened. A pass checks each record against its CRC-32C, and raises
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
        """A flow of the files in ``folder``/CLASS/... as (bytes, label), or with ``labels`` of any folder.

        The label is the place of the class folder in sorted order. ``labels`` are those of the files instead,
        by their paths in the folder, or a sequence in the order of the sorted paths. Files come in sorted
        order, or with ``seed`` in a new random order in each pass. Each file is read on its own, which is
        slower than shards. ``suffixes`` default to those of images. A ``map`` with processes reads in its
        workers. Raises UsageError for a folder without such files or with some outside of its class folders,
        and unless there is one of ``labels`` for each file; SourceDamaged for symbolic links in it.
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
        ones, and each takes ``seconds`` to make. ``seed`` selects the images and labels. Raises UsageError.
        """
        items = checked_int(items, "the number of items", least=0)
        seconds = checked_seconds(seconds, "what an item costs")
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
        """Call ``function`` for each item: in the consumer's thread, or in threads, or in worker processes.

        Each item is mapped exactly once per pass. An exception of the function is raised after the results
        before it, with the item's number as a note.

        Processes are the loader's workers: a worker that dies is replaced, and its items are mapped again. A
        worker has 120 s to start; with a ``deadline`` it has that time, but at least 30 s. Items and results
        pass through shared memory, and arrays are not copied on the way back. Lambdas and closures need
        cloudpickle with processes.

        Args:
            function: Called with an item; returns its result. None raises UsageError, unless ``drop_none``.
            threads: Number of threads.
            processes: Number of processes; give at most one of the two.
            ordered: Whether results come in the order of the items, or as soon as they are made.
            drop_none: Whether to leave out items whose result is None; the length becomes an upper bound.
            random: Whether to call ``function(item, rng)``: ``rng`` is a numpy Generator that depends on
                ``seed``, the pass and the item, and is valid during the call only.
            seed: Seed of ``rng``.
            outputs: The array that the function returns, or a tuple of them: the workers then write the rows
                of a following ``batch`` in place.
            deadline: Seconds after which an item counts as hung; None is no limit.

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

        An item becomes (result of the transform, label). A dict in place of the image has ``image`` and
        the columns by their names. Items may be such dicts themselves, with ``key`` and ``label``, or
        records.

        Args:
            transform: The transform.
            threads: Number of threads, as for :meth:`map`.
            processes: Number of processes, as for :meth:`map`.
            seed: Seed of the transform's random values.

        Raises:
            UsageError: In a pass: an item has another form.
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
        call = Function.of_item(function, random=random)
        return Flow(MapComponent(self.node, call, component, random=random, seed=seed))

    def filter(self, predicate: Callable[[Any], Any]) -> Flow:
        """The items for which ``predicate(item)`` is true. The length becomes an upper bound."""
        return Flow(Filter(self.node, Function(predicate)))

    def select(self, *components: int | str) -> Flow:
        """These ``components`` of each item, in this order: numbers give a tuple, names a dict.

        Raises UsageError for a mixture of both, and in a pass for items without such a component.
        """
        return Flow(Select(self.node, components))

    # Steps on the order and number of items

    def shuffle(self, window: int, *, seed: int = 0) -> Flow:
        """Move each item by less than ``window`` places, at random. Every pass has each item once.

        Away from both ends, an item moves by up to half the window in either direction, a quarter on average,
        with a standard deviation of 0.29 windows: a window of 3 n spreads as far as tensorpack's buffer of n.
        Where items can be picked by number (sequences, datasets, files, and maps over those), only numbers
        are shuffled. Otherwise about half a window of items is held in memory.
        """
        return Flow(
            LocallyShuffled(self.node, checked_int(window, "a shuffle window", least=1), seed_of(seed))
        )

    def batch(self, size: int, *, remainder: Remainder = "keep", as_list: bool = False) -> Flow:
        """Combine each ``size`` items into one batch: arrays [size, ...], in tuples or dicts like the items.

        Args:
            size: Items per batch.
            remainder: For the last items, if they are fewer: "keep" makes a smaller batch, "drop" leaves them
                out, "pad" fills the batch with zeros and adds a last component to every batch (in dicts:
                "mask"), bool [size], True for real rows.
            as_list: Whether to make a list of each component's values in place of an array; they may have any
                form.

        Raises:
            UsageError: In a pass: items of a batch differ in form, shape or dtype.
        """
        return Flow(Batch(self.node, checked_int(size, "a batch size", least=1), remainder, as_list))

    def batch_by_shape(self, size: int, *, remainder: Literal["keep", "drop"] = "keep") -> Flow:
        """As :meth:`batch`, but each batch has items of equal shapes. A batch is yielded when it is full.

        Up to ``size`` - 1 items of each shape are held. At the end of a pass, ``remainder`` keeps or drops
        them; kept batches come in the order of their first items.
        """
        return Flow(BatchByShape(self.node, checked_int(size, "a batch size", least=1), remainder))

    def pad(self, value: complex = 0) -> Flow:
        """Pad the arrays of each list of a batch to the largest of them, and stack them.

        For batches of lists (``batch(n, as_list=True)``): a list of arrays with one dtype and number of
        dimensions, of any sizes, becomes one array, which has ``value`` where an array ends earlier. Lists of
        numbers become arrays, lists of anything else stay. Raises UsageError in a pass for other arrays, and
        for a value that their dtype cannot hold.
        """
        return self.map(Padding(value))

    def unbatch(self) -> Flow:
        """The rows of each batch, as views of it. The mask of a padded batch stays a component."""
        return Flow(Unbatch(self.node))

    def repeat(self, passes: int | None = None) -> Flow:
        """``passes`` passes in each pass; None repeats without end.

        With n passes, pass p runs the passes p * n to p * n + n - 1 of this flow. Raises UsageError for an
        infinite flow, and for a flow without items that is repeated without end.
        """
        number = None if passes is None else checked_int(passes, "the number of passes", least=0)
        return Flow(Repeat(self.node, number))

    def take(self, count: int) -> Flow:
        """The first ``count`` items of each pass."""
        return Flow(Take(self.node, checked_int(count, "the number of items to take", least=0)))

    def skip(self, count: int) -> Flow:
        """Each pass without its first ``count`` items. Items by number are not made to be skipped."""
        return Flow(Skip(self.node, checked_int(count, "the number of items to skip", least=0)))

    def concat(self, *others: Flow) -> Flow:
        """This flow's items, then those of ``others``. UsageError if a flow before the last is infinite."""
        return Flow(Concat(self._nodes(others)))

    def zip(self, *others: Flow) -> Flow:
        """One item of this flow and of each of ``others`` as one item, until one of the flows ends.

        Dicts are joined into one dict; any other items become one tuple; tuples and lists in it are
        flattened. Raises UsageError in a pass where two dicts have a name in common.
        """
        return Flow(Zip(self._nodes(others)))

    def mix(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """Interleave every item of this flow and of ``others`` at random; each flow's items stay in order.

        Args:
            others: The other flows.
            weights: Probabilities of the next item's flow, up to a factor, one for each flow. None is the
                number of items that a flow has left, which needs exact lengths.
            seed: Seed of the choice.

        Raises:
            UsageError: Weights are not positive, or lengths not exact where there are no weights.
        """
        return Flow(Mix(self._nodes(others), as_weights(weights), seed))

    def choose(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """Items of flows that are drawn at random: this flow and ``others``, by ``weights`` or evenly.

        The pass ends when the flow that is drawn has no more items. Raises UsageError for negative weights.
        """
        return Flow(Choose(self._nodes(others), as_weights(weights), seed))

    # Steps on how a pass runs

    def cache(self) -> Flow:
        """Keep the items of the first complete pass in memory, and yield them read-only in every later pass.

        A pass that is closed early keeps nothing. Random steps before this one run only in the kept pass.
        Raises UsageError for an infinite flow.
        """
        return Flow(Cache(self.node))

    def prefetch(self, items: int = 2) -> Flow:
        """Run all steps before this one in a thread, at most ``items`` items ahead."""
        return Flow(Prefetch(self.node, checked_int(items, "the number of items to prefetch", least=1)))

    def in_process(self, *, ahead: int = 64) -> Flow:
        """Run all steps before this one in another process, at most max(``ahead``, 4) items ahead.
        If that process is killed, a new one runs the pass again and continues at the same item. After a pass
        was closed early, its source stays open until the next pass begins or the flow is closed. Lambdas and
        closures need cloudpickle. Raises UsageError for steps with processes and for caches before this step.
        """
        if has(self.node, ProcessMap | InProcess):
            raise UsageError("a step with processes cannot run in another process; leave out in_process()")
        if has(self.node, Cache):  # it would be lost with the process, in the middle of a pass
            raise UsageError("a cache() cannot be kept in another process; put it behind in_process()")
        return Flow(InProcess(self.node, checked_int(ahead, "the items that in_process runs ahead", least=1)))

    def print(self, items: int = 1) -> Flow:
        """Print the types, shapes, dtypes and ranges of the first ``items`` items of each pass to stderr."""
        return Flow(Print(self.node, checked_int(items, "the number of items to print", least=0)))

    def _nodes(self, others: Sequence[Flow]) -> tuple[Node, ...]:
        if not all(isinstance(other, Flow) for other in others):
            raise UsageError("only flows can be combined; make one with Flow.from_iterable")
        return (self.node, *(other.node for other in others))
