"""The loader: batches of a dataset's records, in order, exactly once."""

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

from shardprep.formats.dataset.dataset import open_dataset
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.worker_pool import usable_cpus
from shardprep.formats.system.owned import Owned
from shardprep.loaders.batching.spec import BatchSpec, full_batch_bytes, loader_specs
from shardprep.loaders.engine.crashes import CrashPolicy
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.protocol.batch import EngineBatch
from shardprep.loaders.engine.protocol.task import Items
from shardprep.loaders.order.epoch import Epoch, EpochSteps, LoadedStep, resumed
from shardprep.loaders.order.epoch_order import Records, Shuffle
from shardprep.loaders.order.ranks import refuse_other_rank
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.transforms.contract import Transform, outputs_of

from .identity import loader_identity
from .options import described, key_of, layout_of, plan_of, worker_count
from .read_ahead import ReadAhead, ShardStream
from .shard_task import ShardWork, items_of
from .stats import LoaderStats

DEFAULT_SLOTS = 9  # two in a queue, one staged, two in the step, one in transit to each, and RESERVE
READ_AHEAD_BYTES = 64 << 20

Loaded = tuple[Any, ...]


class Loader(Owned):
    """Iterable over a dataset's batches, one epoch per iteration: ``for images, labels in loader``.

    A batch of B = ``batch_size`` records of the dataset at ``path`` is a tuple: one array [B, …] per output
    of ``transform``, labels int64 [B], numbered as ``labels`` says, and, if ``with_numbers``, record numbers
    int64 [B]. Outputs without a fixed size are lists; with ``transform=None``, of memoryviews of the encoded
    images. Batches never change, and are equal, bit for bit, for any number of workers. ``shuffle`` (None:
    stored order) and ``seed`` determine the order. Each record comes once per epoch over all ranks, as
    :meth:`receipt` proves, except, if ``drop_last``, those after the last full batch of all ranks.

    ``workers`` are processes (``"auto"``: one per usable CPU; 0: the calling thread). ``rank`` and
    ``world_size`` default to what an initialised framework or the launcher says. ``on_bad_record="skip"``
    leaves out records that are damaged, do not decode, or crash three workers (by SIGSEGV, for example; with
    ``workers=0`` that ends this process). A record may take ``deadline`` seconds before its worker is killed;
    a worker may take as long to start, but at least 30 s, and 120 s without a deadline. ``slots`` batches fit
    the shared memory. ``read_ahead`` bytes are read early, in the order of storage; 0 for none.

    Raises ShardprepError, also for epochs without a batch; errors of a transform unchanged, with the key. Not
    copyable or picklable. One thread and one iterator at a time: a new one ends the last. Close or drop it.
    """

    instead = "pass the path and the options to where the Loader is needed, and make it there"

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
        self._rank_is_given = rank is not None
        # The epochs of the next iteration, of the receipt, and of the state.
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
            key_bytes=self.dataset.index.dtype["key"].itemsize,
            transform=transform,
            label_map=tuple(self._labels.tolist()),
            seed=self._plan.seed,
            skip_bad=on_bad_record == "skip",
            one_thread=count > 0,
        )
        self.engine = Engine(
            self._work,
            layout_of(self.dataset, rows=self._plan.batch_size, outputs=self._outputs),
            workers=count,
            slots=slots,
            deadline=deadline,
            describe=described,
            crashes=CrashPolicy("its decoding" if transform else "its reading", skip=self._work.skip_bad),
        )

    def __len__(self) -> int:
        """Number of batches of the next iteration: those of an epoch, or the rest of a resumed one."""
        return len(self._next)

    def __iter__(self) -> Iterator[Loaded]:
        """Begin the next epoch; one that was left early is not continued."""
        if not self._rank_is_given:
            refuse_other_rank(self._plan.rank, self._plan.world_size)
        epoch = self._current = self._place = self._next
        self._next = Epoch(self._plan, epoch.number + 1)
        return self._run(epoch)

    def _run(self, epoch: Epoch) -> Iterator[Loaded]:
        with self._batches(epoch.batches(), epoch.number) as batches:
            yield from map(partial(self._delivered, epoch), batches)  # a loop variable would hold one longer
        epoch.end()

    @property
    def most_held(self) -> int:
        """Number of batches that may be held at a time before further ones are copied."""
        return self.engine.most_held

    def steps(self, epoch: int, steps: Iterable[int]) -> Iterator[LoadedStep]:
        """Yield the batches of these steps of an epoch, counted from its beginning, in the order given.

        ``steps`` are drawn at most twice ``slots`` ahead. The loader's place and receipt do not change, but a
        current iteration ends. Raises IndexError for a step that the epoch does not have.
        """
        if self._steps is None or self._steps.number != epoch:
            self._steps = EpochSteps(self._plan, operator.index(epoch))
        wanted, drawn = self._steps, deque[int]()
        with self._batches(wanted.batches(steps, drawn), epoch) as batches:
            yield from map(partial(self._loaded, wanted, drawn), batches)

    def _loaded(self, wanted: EpochSteps, drawn: deque[int], batch: EngineBatch) -> LoadedStep:
        return wanted.loaded(drawn.popleft(), *self._without_bad(batch))

    @contextmanager
    def _batches(self, numbers: Iterator[Records], epoch: int) -> Iterator[Iterator[EngineBatch]]:
        with (
            self._reading_ahead(epoch) as ahead,
            closing(self.engine.run(self._items(numbers, epoch, ahead))) as batches,  # type: ignore[type-var]
        ):
            yield batches

    def _reading_ahead(self, epoch: int) -> AbstractContextManager[ReadAhead | None]:
        shards = self._plan.shards(epoch)
        if shards is None or not self._read_ahead:
            return nullcontext()
        stream = ShardStream.of(self.dataset.path, self.dataset.manifest.shards, shards)
        return closing(ReadAhead(stream, budget=self._read_ahead))

    def _items(self, batches: Iterator[Records], epoch: int, ahead: ReadAhead | None) -> Iterator[Items]:
        """Yield the items of each batch, and report their records to the read-ahead."""
        for numbers in batches:
            if ahead is not None:
                ahead.expect(numbers)
            yield items_of(self.dataset.index, numbers, epoch)

    def _delivered(self, epoch: Epoch, batch: EngineBatch) -> Loaded:
        if epoch is not self._current:
            raise UsageError("another iteration of this loader has begun; end this one or use two loaders")
        columns, delivered, skipped = self._without_bad(batch)
        epoch.delivered(delivered, skipped.tolist())
        self._place = epoch
        return tuple(columns)

    def _without_bad(self, batch: EngineBatch) -> tuple[list[Any], Records, Records]:
        """Return the columns without the rows that were skipped, and the record numbers of both."""
        columns = self._columns(batch)
        numbers, bad = batch.items["number"], list(batch.skipped)
        if bad:
            self._skipped.update((self.key(numbers[row]), reason) for row, reason in batch.skipped.items())
            columns = [c if isinstance(c, list) else np.delete(c, bad, axis=0) for c in columns]
        return columns, np.delete(numbers, bad), numbers[bad]

    def _columns(self, batch: EngineBatch) -> list[Any]:
        """The parts of a batch in their order; lists do not contain the rows that were skipped."""
        numbers: npt.NDArray[np.int64] = np.ascontiguousarray(batch.items["number"])
        made = [list(batch.payloads.values())] if self._outputs is None else batch.arrays.values()
        labels = self._labels[batch.items["label"]]  # the workers have checked them against the records
        return [*made, labels, numbers] if self._with_numbers else [*made, labels]

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of a whole epoch."""
        return len(self._plan.split(0))

    @property
    def batch_specs(self) -> tuple[BatchSpec, ...]:
        """The parts of a batch. Raises UsageError for a transform that declares no outputs."""
        if self._outputs is None and self._has_transform:
            raise UsageError("the transform declares no outputs, so the form of its batches is unknown")
        rows = self._plan.batch_size if self._constant_rows else None
        return loader_specs(self._outputs, rows=rows, with_numbers=self._with_numbers)

    @property
    def batch_bytes(self) -> int:
        """Bytes of the arrays of a full batch. Raises UsageError where they have no fixed size."""
        return full_batch_bytes(self.batch_specs, self._plan.batch_size)

    @property
    def identity(self) -> dict[str, str]:
        """The values that determine the batches, by name: equal identities mean equal batches, bit for bit.

        Raises UsageError for a transform that cannot be compared with others.
        """
        return loader_identity(self._plan, self._work, with_numbers=self._with_numbers)

    def key(self, number: int) -> str:
        """Return the key of the record with this number."""
        return key_of(self.dataset.index, number)

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next iteration delivers."""
        return self._next.number

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration deliver this epoch, from its beginning."""
        self._next = self._place = Epoch(self._plan, operator.index(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's place as plain JSON values; only the skipped records make it larger.

        The last batch that was yielded counts as delivered; :meth:`load_state_dict` continues after it, also
        with other workers, batch size or world size. After :meth:`set_epoch` it is that epoch's start.
        """
        return (self._next if self._place.is_over else self._place).state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue where the state was taken. On a UsageError nothing is changed.

        Each rank loads its own state; with another world size, all ranks load the state of one.
        """
        self._next = self._current = self._place = resumed(self._plan, state)

    def receipt(self) -> Receipt:
        """Return what this rank has delivered of the current epoch, or of the last one."""
        return self._current.receipt

    @property
    def skipped(self) -> dict[str, str]:
        """The bad records that were skipped so far: key to reason."""
        return dict(self._skipped)

    def stats(self) -> LoaderStats:
        """Return the counts and times since the loader was made, to be printed. Thread-safe."""
        manifest = self.dataset.manifest
        return LoaderStats(
            **vars(self.engine.stats()),
            workers=self._workers,
            cpus=usable_cpus(),
            image_bytes=manifest.image_bytes / max(1, len(self.dataset)),
        )

    def close(self) -> None:
        """End the workers and release memory and files; delivered batches stay valid. Idempotent."""
        self.engine.close()
        self.dataset.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
