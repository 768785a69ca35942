"""Flow: any Python data, composed into a pipeline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, islice, zip_longest
from typing import Any, Literal

from shardprep.formats.conversion.save import DEFAULT_SHARD_SIZE, NumberedItems, SchemaLike, write_dataset
from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.json_record import parse_natural
from shardprep.formats.runtime.owners import Closable, cached_property
from shardprep.formats.runtime.processes import MAX_WORKERS
from shardprep.formats.runtime.progress import Progress, check_flags, check_int, check_seconds, check_seed
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.storage.open import open_records
from shardprep.loaders.batches.passes import Passes, ending, refuse_sampler
from shardprep.loaders.batches.stack import BatchSpec, Padding, loader_specs
from shardprep.loaders.flow import sources, steps
from shardprep.loaders.flow.map import Filter, Map, MapComponent, Prefetch, Select, ThreadMap, Transforming
from shardprep.loaders.flow.node import (
    Function,
    Length,
    Node,
    PassContext,
    PassMeter,
    PassResources,
    contains,
    walk,
)
from shardprep.loaders.flow.process_map import InProcess, ProcessMap, check_map_outputs
from shardprep.loaders.flow.stats import FlowMeter, FlowSpeed, FlowStats, measure
from shardprep.loaders.flow.steps import Remainder
from shardprep.loaders.loader.run_card import TransformRule, check_transforms, describe_transform
from shardprep.loaders.loader.work import Subset, location_of, make_epoch_plan
from shardprep.loaders.order.epoch import Shuffle
from shardprep.loaders.transforms.contract import ArraySpec, Transform

STATE_VERSION = 1


@dataclass(frozen=True)
class FlowPosition:
    """The position in pass ``pass_number`` after ``items`` items."""

    pass_number: int = 0
    items: int = 0


def check_position(node: Node, position: FlowPosition) -> None:
    """Raise UsageError if a pass cannot begin at this position."""
    if position.items and not node.can_pick:
        raise UsageError(
            f"{_first_unpickable(node).label} has no items by number, so this flow can only continue at "
            "the beginning of a pass: take its state between two passes"
        )
    if position.items and position.items > node.length.items:
        raise UsageError(
            f"not the state of this flow: a pass has {node.length}, and not {position.items} items"
        )


def structure_of(node: Node) -> Iterator[str]:
    """Yield the descriptions of a flow's steps and sources, from last to first."""
    yield node.description
    for number, source in enumerate(node.sources):
        prefix = f"{number}. " if len(node.sources) > 1 else ""
        yield from (prefix + line for line in structure_of(source))


def _first_unpickable(node: Node) -> Node:
    for source in node.sources:
        if not source.can_pick:
            return _first_unpickable(source)
    return node


@dataclass(frozen=True)
class FlowItems(NumberedItems):
    """The items of pass 0 of a ``node`` that can pick. ``resources`` are its flow's, None elsewhere."""

    node: Node
    resources: PassResources | None = None

    def __len__(self) -> int:
        return self.node.length.items

    def pick(self, numbers: Iterable[int]) -> Iterator[Any]:
        return self.node.pick(PassContext(0, self.resources or PassResources()), numbers)

    def for_workers(self) -> NumberedItems | None:
        node = _without_workers(self.node)
        return None if contains(node, ProcessMap | InProcess) else FlowItems(node)


def _without_workers(node: Node) -> Node:
    """Return the node without the threads and processes of its last maps: the writing workers replace them.

    Declared outputs are kept, because they may change the dtype of a result.
    """
    if isinstance(node, ProcessMap) and node.outputs is not None:
        return node
    if isinstance(node, ThreadMap | ProcessMap):
        options = {name: getattr(node, name) for name in ("drop_none", "random", "seed")}
        return Map(_without_workers(node.source), node.function, **options)
    return (
        replace(node, source=_without_workers(node.source)) if isinstance(node, Map | MapComponent) else node
    )


class Flow(Closable):
    """An immutable description of a pipeline; each step returns a new flow, and iterating it runs one pass.

        train = Flow.from_files("train").shuffle(10_000).map(load, processes=8).batch(256)
        for images, labels in train: ...

    ``node`` is the last node of the pipeline. Use the static methods to make a flow, not the constructor.

    The first iteration runs pass 0, the next ones 1, 2, ...; :meth:`at_pass` runs any pass. The items of a
    pass depend only on its number, the data and the seeds, for any number of processes or threads. Random
    values depend only on (seed, pass, item number, step). Several passes of one flow may run at once.

    Worker processes and caches live from one pass to the next. Closing or dropping the flow ends them.
    ``len(flow)`` is exact or raises TypeError; :attr:`length` tells what is known. A flow is picklable; the
    copy begins at pass 0. Only one thread at a time may begin passes, and only one may draw from each pass.
    A step that cannot work raises UsageError when it is added.
    """

    def __init__(self, node: Node) -> None:
        if not isinstance(node, Node):
            raise UsageError(
                "make a flow by Flow.from_iterable(items), Flow.from_dataset(path) or another source"
            )
        self.node = node
        self._resources = PassResources()
        self._next_position = FlowPosition()
        self._current = self._next_position, PassMeter()  # start of the current pass, and its counters
        self._pending: FlowPosition | None = None  # start of an iterator that has not begun
        self._meter = FlowMeter(node)

    # Sources

    @staticmethod
    def from_iterable(items: Iterable[Any] | Sized) -> Flow:
        """A flow of the elements of ``items``, each once per pass.

        The items of a sequence (``len`` and ``[]``) can be picked and shuffled by number. Raises UsageError
        for an iterator, because it has only one pass: use :meth:`from_callable`.
        """
        return Flow(sources.from_iterable(items))

    @staticmethod
    def from_callable(begin: Callable[[], Iterable[Any]]) -> Flow:
        """A flow of the items of ``begin()``, which is called once per pass. The length is unknown.

        ``begin`` returns an iterable; a generator function works. Raises UsageError if ``begin`` is not
        callable, and in a pass if its result is not iterable.
        """
        return Flow(sources.FromCallable(Passes(Function(begin))))

    @staticmethod
    def from_parts(make: Callable[[int], Iterable[Any]], *, parts: int) -> Flow:
        """A flow of one item from each of ``make(0)``, ..., ``make(parts - 1)`` in turn, until all end.

        ``make(part)`` is called once per pass and returns an iterable, such as a generator. Parts that have
        ended are skipped. If ``make`` returns a Flow, the part is that flow's pass of the same number, with
        its own random values. All ``parts`` are open at the same time. The length is unknown.

        Several machines that :func:`.serve` this flow share the parts of a pass without changing the order:
        each part is made by one of them at a time. Steps after this one run on one machine at a time, so put
        expensive steps (``map``, ``batch``) into ``make``. Raises UsageError for fewer than one part, and in
        a pass if the result of ``make`` is not iterable.
        """
        return Flow(sources.FromParts(Function(make), check_int(parts, "the number of parts", least=1)))

    @staticmethod
    def from_dataset(
        path: str | os.PathLike[str],
        *,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        labels: str = "sorted_wnid0",
        with_keys: bool = False,
        columns: Sequence[str] | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
    ) -> Flow:
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
        check_flags(with_keys=with_keys)
        dataset = open_records(location_of(path), labels=labels, cache=cache, cache_limit=cache_limit)
        with ExitStack() as undo:
            undo.callback(dataset.close)
            # a flow's steps are items; it has no ranks
            each = getattr(shuffle, "partitions", 1)
            plan = make_epoch_plan(Subset(dataset), shuffle=shuffle, seed=seed, batch_size=each)
            node = sources.FromDataset.of(dataset, plan, columns, with_keys=with_keys)
            undo.pop_all()
        return Flow(node)

    @staticmethod
    def from_files(
        folder: str | os.PathLike[str],
        *,
        labels: Mapping[str, int] | Sequence[int] | None = None,
        suffixes: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Flow:
        """A flow of the files in ``folder``/CLASS/... as (bytes, label); with ``labels``, of any folder.

        The label is the position of the class folder in sorted order, unless ``labels`` gives the labels by
        path relative to the folder, or as a sequence in the order of the sorted paths. Files come in sorted
        order or, with ``seed``, in a new random order in each pass. Reading single files is slower than
        reading shards. ``suffixes`` defaults to those of images. A ``map`` with processes reads in its
        workers. Raises UsageError if the folder has no such files, if some are outside of its class folders,
        or unless ``labels`` has exactly one label for each file; SourceDamaged for symbolic links.
        """
        return Flow(sources.FromFiles.of(folder, suffixes=suffixes, seed=seed, labels=labels))

    @staticmethod
    def fake(
        items: int,
        *,
        size: tuple[int, int] = (224, 224),
        encoded: bool = False,
        seconds: float = 0.0,
        seed: int = 0,
    ) -> Flow:
        """A flow of ``items`` generated (image, label) pairs, without any file.

        An image is noise, uint8 [H, W, 3] with ``size`` (H, W); with ``encoded``, the bytes of a real JPEG
        file. Labels are ints. As in :class:`.FakeData`, images are read-only and repeat after a few different
        ones; each takes ``seconds`` to make. ``seed`` selects the images and labels. Raises UsageError.
        """
        items = check_int(items, "the number of items", least=0)
        return Flow(sources.FromFakeData(sources.MadeUp(1, size, encoded, seconds, seed), items))

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
        check_flags(ordered=ordered, drop_none=drop_none, random=random)
        threads = check_int(threads, "threads", least=0, most=MAX_WORKERS)
        processes = check_int(processes, "processes", least=0, most=MAX_WORKERS)
        if threads and processes:
            raise UsageError(f"threads={threads}, processes={processes}: give a number for one of them")
        call = Function.of_item(function, random=random)
        options: dict[str, Any] = {"drop_none": drop_none, "random": random, "seed": check_seed(seed)}
        if processes:
            if deadline is not None:
                check_seconds(deadline, "a deadline", above=0)
            options |= {"processes": processes, "ordered": ordered, "deadline": deadline}
            is_single = isinstance(outputs, ArraySpec)
            return Flow(
                ProcessMap(
                    self.node, call, outputs=check_map_outputs(outputs), is_single=is_single, **options
                )
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
        specs = function.outputs  # also checks the transform
        outputs = specs if processes else None
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

        Away from both ends, an item moves by at most about half the window, a quarter on average, with a
        standard deviation of 0.29 windows: a window of 3 n spreads as far as tensorpack's buffer of n.
        If items can be picked by number (sequences, datasets, files, and maps over those), only numbers are
        shuffled, and a window of at least their number makes all orders equally likely. Otherwise about half
        a window of items is held in memory, and no window does.
        """
        return Flow(
            steps.LocallyShuffled(self.node, check_int(window, "a shuffle window", least=1), check_seed(seed))
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
        return Flow(steps.Batch(self.node, check_int(size, "a batch size", least=1), remainder, as_list))

    def batch_by_shape(
        self, size: int, *, remainder: Literal["keep", "drop"] = "keep", as_list: bool = False
    ) -> Flow:
        """Like :meth:`batch`, but each batch has items of equal shapes, and is yielded when it is full.

        Up to ``size`` - 1 items of each shape are held. At the end of a pass, ``remainder`` keeps or drops
        them; kept batches come in the order of their first items. With ``as_list``, also of text,
        batches are lists; :meth:`pad` stacks the arrays in them.
        """
        size = check_int(size, "a batch size", least=1)
        return Flow(steps.BatchByShape(self.node, size, remainder, as_list))

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
        return Flow(steps.Unbatch(self.node))

    def repeat(self, passes: int | None = None) -> Flow:
        """Run ``passes`` passes in each pass; None repeats forever.

        With n passes, pass p runs the passes p * n to p * n + n - 1 of this flow. Raises UsageError for an
        infinite flow, and for repeating an empty flow forever.
        """
        number = None if passes is None else check_int(passes, "the number of passes", least=0)
        return Flow(steps.Repeat(self.node, number))

    def take(self, count: int) -> Flow:
        """Keep the first ``count`` items of each pass."""
        return Flow(steps.Take(self.node, check_int(count, "the number of items to take", least=0)))

    def skip(self, count: int) -> Flow:
        """Leave out the first ``count`` items of each pass, without making them if items have numbers."""
        return Flow(steps.Skip(self.node, check_int(count, "the number of items to skip", least=0)))

    def concat(self, *others: Flow) -> Flow:
        """Append the items of ``others``. Raises UsageError if a flow before the last is infinite."""
        return Flow(steps.Concat(self._nodes(others)))

    def zip(self, *others: Flow) -> Flow:
        """Join one item from this flow and from each of ``others`` into one, until one of the flows ends.

        Dicts are merged into one dict; any other items become one tuple, into which tuples and lists are
        flattened. Flows that were shuffled before come in different orders, even with one seed: zip, then
        shuffle. Raises UsageError in a pass if two dicts share a name.
        """
        return Flow(steps.Zip(self._nodes(others)))

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
        return Flow(steps.Mix.of(self._nodes(others), weights, seed))

    def choose(self, *others: Flow, weights: Sequence[float] | None = None, seed: int = 0) -> Flow:
        """Take each item from this flow or one of ``others``, chosen at random, by ``weights`` or evenly.

        The pass ends when the chosen flow has no more items. Raises UsageError for negative weights.
        """
        return Flow(steps.Choose.of(self._nodes(others), weights, seed))

    # Steps on how a pass runs

    def cache(self) -> Flow:
        """Keep the items of the first complete pass in memory, and yield them read-only in every later pass.

        A pass that is closed early keeps nothing. Random steps before this one run only in that first pass.
        Raises UsageError for an infinite flow.
        """
        return Flow(steps.Cache(self.node))

    def prefetch(self, items: int = 2) -> Flow:
        """Run all steps before this one in a thread, at most ``items`` items ahead."""
        return Flow(Prefetch(self.node, check_int(items, "the number of items to prefetch", least=1)))

    def in_process(self, *, ahead: int = 64) -> Flow:
        """Run all steps before this one in another process, at most max(``ahead``, 4) items ahead.

        If that process is killed, a new one runs the pass again and continues at the same item. When a pass
        is closed early, its source stays open until the next pass begins or the flow is closed. Lambdas and
        closures need cloudpickle. Raises UsageError if there are steps with processes or caches before it.
        """
        if contains(self.node, ProcessMap | InProcess):
            raise UsageError("a step with processes cannot run in another process; leave out in_process()")
        if contains(self.node, steps.Cache):  # the cache would be lost with the process
            raise UsageError("a cache() cannot be kept in another process; put it after in_process()")
        return Flow(InProcess(self.node, check_int(ahead, "the number of items to run ahead", least=1)))

    def print(self, items: int = 1) -> Flow:
        """Print the types, shapes, dtypes and ranges of the first ``items`` items of each pass to stderr."""
        return Flow(steps.Print(self.node, check_int(items, "the number of items to print", least=0)))

    def _nodes(self, others: Sequence[Flow]) -> tuple[Node, ...]:
        if not all(isinstance(other, Flow) for other in others):
            raise UsageError("only flows can be combined; make one with Flow.from_iterable")
        return (self.node, *(other.node for other in others))

    # Passes

    def peek(self, items: int = 1) -> list[Any]:
        """Return the first ``items`` items of pass 0 as a list, and close the pass."""
        count = check_int(items, "the number of items", least=0)
        with ending(self.at_pass(0)) as drawn:
            return list(islice(drawn, count))

    def measure(self, *, seconds: float = 5.0) -> FlowSpeed:
        """Measure for ``seconds`` seconds how fast a consumer that does nothing gets passes 0, 1, ...

        The next iteration begins or continues as without it.
        """
        return measure(map(self.at_pass, count()), has_rows=self.node.makes_batches, seconds=seconds)

    def stats(self) -> FlowStats:
        """Return the printable counts and times of all passes since the flow was made. Thread-safe.

        Includes all passes begun by iteration or :meth:`at_pass`, also unfinished ones. Flows made from this
        one count their own.
        """
        return self._meter.read()

    def __iter__(self) -> Iterator[Any]:
        """Iterate the next pass, or from where a loaded state was taken; it begins with its first item."""
        self._transforms  # noqa: B018 - before calls in this process change them
        self._pending = self._next_position
        return self._run()

    def _run(self) -> Iterator[Any]:
        start, self._next_position = self._next_position, FlowPosition(self._next_position.pass_number + 1)
        ctx = self._context(start.pass_number)
        self._current = start, ctx.meter
        yield from self._begin(ctx, start.items)

    def at_pass(self, number: int) -> Iterator[Any]:
        """Begin pass ``number``. Raises UsageError unless 0 <= number < 2**63."""
        return self._begin(self._context(number))

    def _begin(self, ctx: PassContext, start: int = 0) -> Iterator[Any]:
        items = self.node.pick(ctx, range(start, self.length.items)) if start else self.node.run(ctx)
        return self._meter.count(items, ctx.meter)

    def _context(self, number: int) -> PassContext:
        return PassContext(check_int(number, "the number of a pass", least=0), self._resources)

    @property
    def parts(self) -> int:
        """The number of parts that can be made separately; 1 except for :meth:`.Flow.from_parts`."""
        return self.node.parts if isinstance(self.node, sources.FromParts) else 1

    def part(self, pass_number: int, number: int) -> Iterator[Any]:
        """Begin one part of a pass. Raises UsageError for a part that does not exist."""
        if check_int(number, "the number of a part", least=0) >= self.parts:
            raise UsageError(f"this flow has the parts 0 to {self.parts - 1}, not {number}")
        ctx, node = self._context(pass_number), self.node if self.parts > 1 else None
        return node.part(ctx, number) if isinstance(node, sources.FromParts) else self._begin(ctx)

    def as_part(self, ctx: PassContext, number: int) -> Iterator[Any]:
        """Run a pass as part ``number`` of the pass ``ctx`` of another flow."""
        return self.node.run(
            PassContext(ctx.number, self._resources, (*ctx.branch, number), ctx.meter, ctx.group)
        )

    @property
    def can_pick(self) -> bool:
        """Whether :meth:`pick` works: the source has items by number, and every step supports it."""
        return self.node.can_pick

    def pick(self, pass_number: int, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield the items of a pass with these ``numbers``, in that order.

        ``numbers`` may be drawn some items ahead. Raises UsageError unless :attr:`can_pick`, and IndexError
        for a number that does not exist.
        """
        if not isinstance(numbers, Iterable):
            raise UsageError(f"items are picked by several numbers: give a list, not {numbers!r}")
        if not self.can_pick:
            raise UsageError(f"{_first_unpickable(self.node).label} has no items by number to pick")
        return self.node.pick(self._context(pass_number), numbers)

    def by_number(self) -> FlowItems | None:
        """Return the items of pass 0 by number, for :func:`.write_dataset`; None if they have no numbers."""
        return FlowItems(self.node, self._resources) if self.can_pick else None

    def save(
        self,
        output: str | os.PathLike[str],
        *,
        schema: SchemaLike | None = None,
        classes: Sequence[str] | None = None,
        split: str = "train",
        container: str = "lmdb",
        shard_size: int = DEFAULT_SHARD_SIZE,
        order: str = "given",
        seed: int = 0,
        workers: int | None = None,
        progress: Progress | None = None,
        restart: bool = False,
    ) -> Manifest:
        """Write the items of pass 0 as a dataset to ``output``; ``Flow.from_dataset(output)`` yields them.

        The arguments, the result and the errors are those of :func:`.write_dataset`. If the items have
        numbers (:attr:`can_pick`), the writing workers make them instead of the processes of a ``map``.
        Raises UsageError for an infinite flow.
        """
        if self.length.is_infinite:
            raise UsageError("an infinite flow cannot be saved; use take(n), or leave out repeat()")
        numbered = self.by_number()
        with ending(self.at_pass(0) if numbered is None else iter(())) as items:
            return write_dataset(
                items if numbered is None else numbered,
                output,
                schema=schema,
                classes=classes,
                split=split,
                container=container,
                shard_size=shard_size,
                order=order,
                seed=seed,
                workers=workers,
                progress=progress,
                restart=restart,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the pass that iteration began last, as plain JSON values.

        The last yielded item counts as delivered; items that steps hold ahead do not. After
        :meth:`load_state_dict`, even in another process with different numbers of threads or processes, the
        next iteration yields the items that would have followed. Raises UsageError within a pass of a flow
        without items by number (:attr:`can_pick`): such a flow has a state only between two passes.
        """
        start, meter = self._current
        position = FlowPosition(start.pass_number, start.items + meter.items)
        if meter.is_over or (self.length.is_exact and position.items >= self.length.items):
            position = FlowPosition(start.pass_number + 1)
        check_position(self.node, position)
        state = {
            "version": STATE_VERSION,
            "flow": list(structure_of(self.node)),
            "pass": position.pass_number,
            "items": position.items,
        }
        return state | ({"transforms": self._transforms} if self._transforms else {})

    def state_or_none(self) -> dict[str, Any] | None:
        """Return the state, None if :meth:`state_dict` raises UsageError."""
        try:
            return self.state_dict()
        except UsageError:
            return None

    @cached_property
    def _transforms(self) -> list[dict[str, Any]]:
        """The transforms of the steps in the form of a state, in the order of :func:`structure_of`."""
        calls = (node.function.call for node in walk(self.node) if isinstance(node, Map))
        return [describe_transform(call.transform) for call in calls if isinstance(call, Transforming)]

    def load_state_dict(self, state: dict[str, Any], *, transform: TransformRule = "same") -> None:
        """Make the next iteration continue at the ``state`` of an equal flow.

        Compares the steps, their options and seeds, the lengths of sources and, unless ``transform`` is
        ``"changed"``, the transforms of :meth:`.Flow.transform`, but not other functions or contents. Raises
        UsageError for the state of a different flow, and then changes nothing.
        """
        try:
            structure = [*state["flow"]] if state["version"] == STATE_VERSION else None
            position = FlowPosition(parse_natural(state["pass"]), parse_natural(state["items"]))
        except (KeyError, TypeError, ValueError):
            structure = None
        if structure is None:
            raise UsageError(f"not the state of a flow, or not of version {STATE_VERSION}")
        for lines in zip_longest(structure_of(self.node), structure):
            if lines[0] != lines[1]:
                here, there = ("no step" if line is None else str(line)[:200] for line in lines)
                raise UsageError(f"the state is from another flow: it has {there} where this one has {here}")
        transforms = state.get("transforms", self._transforms)  # older states have none
        check_transforms(transforms, self._transforms, transform)
        check_position(self.node, position)
        self._next_position, self._current = position, (position, PassMeter())

    @property
    def length(self) -> Length:
        """The number of items of each pass: exact, an upper bound, unknown or infinite."""
        return self.node.length

    def __len__(self) -> int:
        """Return the number of items of the next iteration: of a pass, or of the rest of a resumed one.

        Raises TypeError if it is not known exactly.
        """
        refuse_sampler(self)
        return self.batches_per_epoch - (
            0 if self._next_position is self._pending else self._next_position.items
        )

    @property
    def batches_per_epoch(self) -> int:
        """The number of items of a whole pass. Raises TypeError if it is not known exactly."""
        if not self.length.is_exact:
            raise TypeError(
                f"the length of this flow is {self.length}: count its items, or end an infinite one by take(n)"
            )
        return self.length.items

    def __bool__(self) -> bool:
        return True

    @property
    def batches_never_change(self) -> bool:
        """Whether no step writes to an item after yielding it, so that consumers need no copy."""
        return self.node.items_never_change

    def close(self) -> None:
        """End this flow's worker processes and drop its caches; the next pass makes new ones. Idempotent.

        Flows made from this one, and flows that it was made from, keep their own workers and caches.
        """
        resources, self._resources = self._resources, PassResources()
        resources.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.node,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} ending in {type(self.node).__name__}, length {self.length}>"


class FakeData(Flow):
    """A flow of made-up batches of images and labels, to stand in for a :class:`Loader` without any files.

    Images are uint8 [B, H, W, 3] of noise, aligned to 64 bytes, and labels int64 [B], 0 to ``classes`` - 1.
    All are read-only. The batches are views of a few records made in advance from ``seed``, two batches of
    pixels or 50 files, which repeat. Equal arguments make equal batches in every epoch. An epoch is a pass of
    the flow; state and stats are the flow's.

    There are no ranks: each process gets all batches. Several iterators may run at once, in any threads; the
    state belongs to the latest one. A pickle is small and does not include the state.

    Args:
        batches: Number of batches per epoch.
        batch_size: Records per batch, B.
        size: (H, W) of the images.
        encoded: Whether images are instead a list of B memoryviews of JPEG files: crops of photographs, 110
            KB on average, 45 KB to 205 KB (5th to 95th percentile), about 480x400, regardless of ``size``.
        seconds: Delay of each batch per record, as a sleep, which uses no CPU and takes as long on a busy
            machine.
        seed: Seed of the records, 0 to 2**64 - 1.
        classes: Number of classes.

    Raises:
        UsageError: An argument is out of range.
    """

    def __init__(
        self,
        batches: int,
        *,
        batch_size: int,
        size: tuple[int, int] = (224, 224),
        encoded: bool = False,
        seconds: float = 0.0,
        seed: int = 0,
        classes: int = 1000,
    ) -> None:
        self._data = sources.MadeUp(batch_size, size, encoded, seconds, seed, classes)
        super().__init__(
            sources.FromFakeBatches(self._data, check_int(batches, "the number of batches", least=0))
        )

    @property
    def epoch(self) -> int:
        """The number of the next iteration's epoch."""
        return self._next_position.pass_number

    def set_epoch(self, epoch: int) -> None:
        """Start the next iteration at the beginning of this epoch."""
        self._next_position = FlowPosition(check_int(epoch, "the number of an epoch", least=0))
        self._current = self._next_position, PassMeter()

    @property
    def batch_specs(self) -> tuple[BatchSpec, ...]:
        """The parts of a batch."""
        outputs = None if self._data.encoded else [ArraySpec("image", (*self._data.size, 3), "uint8")]
        return loader_specs(outputs, rows=self._data.batch_size, with_numbers=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FakeData, self.batches_per_epoch, **asdict(self._data)), ()
