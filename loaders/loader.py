"""The loader: from shards to batches, in order, exactly once, at the speed of the decoder."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from ..formats.dataset import open_dataset
from ..formats.errors import UsageError
from ..formats.index import Rows
from ..formats.pool import usable_cpus
from .assembly import key_of, layout_of, plan_of, worker_count
from .batch_spec import BatchSpec, full_batch_bytes, loader_specs
from .batches import Batch
from .engine import Engine
from .epoch import Epoch, resumed
from .epoch_steps import EpochSteps, LoadedStep
from .identity import loader_identity
from .loader_stats import LoaderStats
from .order import Records, Shuffle
from .read_ahead import ReadAhead, Stream
from .receipt import Receipt
from .shard_work import ShardWork, items_of
from .transforms import Transform, outputs_of
from .work import Items

# two in a queue, one staged, two with the step, and one on the way to each, besides our two
DEFAULT_SLOTS = 9
READ_AHEAD_BYTES = 64 << 20

Loaded = tuple[Any, ...]


class Loader:
    """Iterating it delivers one epoch: ``for images, labels in loader``.

    A batch is a tuple: one array per output of the transform, each [B, …], then labels int64 [B] and,
    with ``with_numbers``, the record numbers int64 [B]. What has no fixed size is a list of B instead:
    with ``transform=None``, memoryviews of the encoded bytes. Batches are the same, bit for bit, for any
    number of workers; they never change once delivered, however long they are held. Each record comes
    exactly once per epoch over all ranks, but for what ``drop_last`` leaves out (all of it, where that is
    less than a batch for every rank); :meth:`receipt` proves it.

    ``workers`` are processes (``"auto"``: one per usable CPU; 0: the calling thread). ``rank`` and
    ``world_size`` default to what the launcher's environment says. ``on_bad_record="skip"`` delivers
    batches without the records that are damaged or do not decode. ``deadline`` is the number of seconds
    after which a record that makes no progress counts as one that killed its worker. ``slots`` batches
    lie in shared memory. ``read_ahead`` bytes are read before they are needed, where records are read in
    the order of storage, about; 0 for none.

    Raises ShardprepError; errors of a transform come as themselves, with the record's key. One thread at
    a time may iterate, and one iterator at a time: the next one begins the next epoch and ends the one
    before. Not picklable. Close it, or drop it.
    """

    batches_never_change = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batch_size: int = 256,
        transform: Transform | None = None,
        shuffle: Shuffle | None = None,
        seed: int = 0,
        workers: int | Literal["auto"] = "auto",
        rank: int | None = None,
        world_size: int | None = None,
        drop_last: bool = True,
        labels: str = "sorted_wnid0",
        on_bad_record: Literal["raise", "skip"] = "raise",
        with_numbers: bool = False,
        slots: int = DEFAULT_SLOTS,
        deadline: float | None = None,
        read_ahead: int = READ_AHEAD_BYTES,
    ) -> None:
        if on_bad_record not in ("raise", "skip"):
            raise UsageError(f"on_bad_record must be 'raise' or 'skip', not {on_bad_record!r}")
        if read_ahead < 0:
            raise UsageError(f"read_ahead must be a number of bytes, or 0 for none, not {read_ahead}")
        count = self._workers = worker_count(workers)
        self.dataset = open_dataset(Path(path).absolute(), labels=labels)
        self._plan = plan_of(
            self.dataset,
            shuffle=shuffle,
            seed=seed,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
        )
        # What the next iteration delivers, what the receipt is of, what the state is of.
        self._next = self._current = self._place = Epoch(self._plan, 0)
        self._labels = self.dataset.manifest.labels.mapping(labels)
        self._has_transform = transform is not None
        self._outputs = outputs_of(transform) if transform is not None else None
        self._with_numbers = with_numbers
        self._constant_rows = drop_last and on_bad_record == "raise"
        self._read_ahead = read_ahead
        self._skipped: dict[str, str] = {}
        self._steps: EpochSteps | None = None
        self._work = ShardWork(
            folder=self.dataset.path,
            container=self.dataset.manifest.container,
            shards=self.dataset.manifest.shards,
            transform=transform,
            label_map=tuple(self._labels.tolist()),
            seed=self._plan.seed,
            skip_bad=on_bad_record == "skip",
            one_thread=count > 0,
        )
        self._engine = Engine(
            self._work,
            layout_of(self.dataset, rows=self._plan.batch_size, outputs=self._outputs),
            workers=count,
            slots=slots,
            deadline=deadline,
            describe=partial(_described, self.dataset.index),
        )

    def __len__(self) -> int:
        """How many batches the next iteration yields: of a whole epoch, or what is left of a resumed one."""
        return len(self._next)

    def __iter__(self) -> Iterator[Loaded]:
        """Begin the next epoch; one that was left early is not gone on with."""
        epoch = self._current = self._place = self._next
        self._next = Epoch(self._plan, epoch.number + 1)
        return self._run(epoch)

    def _run(self, epoch: Epoch) -> Iterator[Loaded]:
        with self._batches(epoch.batches(), epoch.number) as batches:
            yield from map(partial(self._delivered, epoch), batches)  # a loop would hold one meanwhile
        epoch.end()

    @property
    def most_held(self) -> int:
        """How many batches may be held at a time before further ones are copied."""
        return self._engine.most_held

    def steps(self, epoch: int, steps: Iterable[int]) -> Iterator[LoadedStep]:
        """The batches that an epoch has at these steps, counted from its beginning, in the order asked for.

        ``steps`` are drawn at most twice ``slots`` ahead. Where iterating is, and its receipt, stays as it is; but an
        iteration under way ends. Raises IndexError for a step that the epoch has not.
        """
        if self._steps is None or self._steps.number != epoch:
            self._steps = EpochSteps(self._plan, operator.index(epoch))
        wanted, drawn = self._steps, deque[int]()
        with self._batches(wanted.batches(steps, drawn), epoch) as batches:
            yield from map(partial(self._loaded, wanted, drawn), batches)

    def _loaded(self, wanted: EpochSteps, drawn: deque[int], batch: Batch) -> LoadedStep:
        return wanted.loaded(drawn.popleft(), *self._without_bad(batch))

    @contextmanager
    def _batches(self, numbers: Iterator[Records], epoch: int) -> Iterator[Iterator[Batch]]:
        with (
            self._reading_ahead(epoch) as ahead,
            closing(self._engine.run(self._items(numbers, epoch, ahead))) as batches,  # type: ignore[type-var]
        ):
            yield batches

    def _reading_ahead(self, epoch: int) -> AbstractContextManager[ReadAhead | None]:
        shards = self._plan.shards(epoch)
        if shards is None or not self._read_ahead:
            return nullcontext()
        stream = Stream.of(self.dataset.path, self.dataset.manifest.shards, shards)
        return closing(ReadAhead(stream, budget=self._read_ahead))

    def _items(self, batches: Iterator[Records], epoch: int, ahead: ReadAhead | None) -> Iterator[Items]:
        """The work of each batch; drawing it tells the reader ahead how far the workers will get."""
        for numbers in batches:
            if ahead is not None:
                ahead.expect(numbers)
            yield items_of(self.dataset.index, numbers, epoch)

    def _delivered(self, epoch: Epoch, batch: Batch) -> Loaded:
        if epoch is not self._current:
            raise UsageError("another iteration of this loader has begun; end the first, or use two loaders")
        columns, delivered, skipped = self._without_bad(batch)
        epoch.delivered(delivered, skipped.tolist())
        self._place = epoch
        return tuple(columns)

    def _without_bad(self, batch: Batch) -> tuple[list[Any], Records, Records]:
        """The columns without the rows that were skipped, and the record numbers of both."""
        columns = self._columns(batch)
        numbers, bad = batch.items["number"], list(batch.skipped)
        if bad:
            self._skipped.update((self.key(numbers[row]), reason) for row, reason in batch.skipped.items())
            columns = [c if isinstance(c, list) else np.delete(c, bad, axis=0) for c in columns]
        return columns, np.delete(numbers, bad), numbers[bad]

    def _columns(self, batch: Batch) -> list[Any]:
        """What the batch has, in the order promised; lists have no place for rows that were skipped."""
        numbers: npt.NDArray[np.int64] = np.ascontiguousarray(batch.items["number"])
        made = [list(batch.payloads.values())] if self._outputs is None else batch.arrays.values()
        labels = self._labels[self.dataset.index["label"][numbers]]
        return [*made, labels, numbers] if self._with_numbers else [*made, labels]

    @property
    def batches_per_epoch(self) -> int:
        """How many batches a whole epoch has."""
        return len(self._plan.split(0))

    @property
    def batch_specs(self) -> tuple[BatchSpec, ...]:
        """The parts of a batch. Raises UsageError for a transform that declares no outputs."""
        if self._outputs is None and self._has_transform:
            raise UsageError("the transform declares no outputs, so its batches' form is unknown")
        rows = self._plan.batch_size if self._constant_rows else None
        return loader_specs(self._outputs, rows=rows, with_numbers=self._with_numbers)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the arrays of a full batch. Raises UsageError where these have no fixed size."""
        return full_batch_bytes(self.batch_specs, self._plan.batch_size)

    @property
    def identity(self) -> dict[str, str]:
        """What decides the batches, by name: loaders of equal identities deliver the same ones, bit for bit.

        Raises UsageError for a transform that nobody can tell from others.
        """
        return loader_identity(self._plan, self._work, with_numbers=self._with_numbers)

    def key(self, number: int) -> str:
        """The key of a record number."""
        return key_of(self.dataset.index, number)

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next iteration delivers."""
        return self._next.number

    def set_epoch(self, epoch: int) -> None:
        """Have the next iteration deliver this epoch, from its beginning."""
        self._next = self._place = Epoch(self._plan, operator.index(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: plain JSON, of one size for any dataset, but for the skipped records.

        Taken between two batches it says that the first of them was delivered; :meth:`load_state_dict`
        goes on with the second, also with other workers, batch size or world size. After
        :meth:`set_epoch` it is the beginning of that epoch.
        """
        return (self._next if self._place.is_over else self._place).state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have the next iteration go on where the state was taken. Raises UsageError, and changes nothing.

        Each rank loads its own state, or, in a world of another size, all load the state of one.
        """
        self._next = self._current = self._place = resumed(self._plan, state)

    def receipt(self) -> Receipt:
        """What this rank has delivered of the epoch under way, or of the last one."""
        return self._current.receipt

    @property
    def skipped(self) -> dict[str, str]:
        """The bad records that were passed over so far: key to reason."""
        return dict(self._skipped)

    def stats(self) -> LoaderStats:
        """Where the time went since the loader was made, and what limits; ``print`` it. Thread-safe."""
        manifest = self.dataset.manifest
        return LoaderStats(
            **vars(self._engine.stats()),
            workers=self._workers,
            cpus=usable_cpus(),
            image_bytes=manifest.image_bytes / max(1, len(self.dataset)),
        )

    def close(self) -> None:
        """End the workers and give back memory and files; delivered batches stay. Safe to call twice."""
        self._engine.close()
        self.dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _described(index: Rows, item: Any) -> str:
    return key_of(index, item["number"])
