"""An input that puts batches on the devices ahead of the step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import Passes, Source
from shardprep.loaders.tf_inputs.feeding.feeder import Feeder
from shardprep.loaders.tf_inputs.feeding.graph_sinks import SessionSink, SessionStage
from shardprep.loaders.tf_inputs.feeding.staging_areas import StagingAreas
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import Leaves, flat, renamed, signature_of
from shardprep.loaders.tf_inputs.tensors.tensors import tensors_of

from .fed_input import FedInput
from .input import Input


class StagingInput(FedInput):
    """A staging area of ``depth`` batches on each device, which a thread fills from ``source``.

    ``source`` is another input, which is closed together with this one, or any source of :class:`QueueInput`.
    ``signature`` is as for :class:`QueueInput`. ``device`` defaults to the first GPU, or the CPU. With
    ``strategy``, each batch is the global batch: every replica gets its part of the rows, on its own device;
    if the rows do not divide evenly, the first replicas get one row more. Iterating then yields values for
    ``strategy.run(step, args=batch)``, and in a graph ``dequeue`` belongs in the replica's function.

    A Loader's default ``slots`` suffice for depth 1 over a queue of 2. Each further batch needs one slot
    more, otherwise batches are copied. All batches of an epoch are delivered. Batches on the device are not
    copied. Made in a v1 graph, it wraps an input of that graph, on one device, and starts that input, too.
    Raises UsageError for a ``depth`` below 1, and for ``device`` together with ``strategy``.
    """

    def __init__(
        self,
        source: Source,
        *,
        device: str | None = None,
        strategy: Any = None,
        depth: int = 1,
        signature: Any = None,
    ) -> None:
        if depth < 1 or (device and strategy):
            raise UsageError(
                f"depth={depth}, device={device}: depth is at least 1, a strategy has its own devices"
            )
        self._strategy = strategy
        self._wrapped = source if isinstance(source, Input) else None
        passes = Passes(source)
        element_spec = signature_of(passes, signature)
        devices = list(strategy.extended.worker_devices) if strategy else [device or _first_device()]
        make = self._eager if tf.executing_eagerly() else self._in_session
        sink, feeder = make(passes, element_spec, devices, depth)
        super().__init__(passes, element_spec, sink, feeder)

    def _eager(self, passes: Passes, element_spec: Any, devices: list[str], depth: int) -> tuple[Any, Feeder]:
        specs = [_part_of(spec, len(devices)) for spec in flat(element_spec)]
        areas = StagingAreas(specs, devices, depth)
        split = partial(_split, element_spec, len(devices), passes.batches_never_change)
        return areas, Feeder(passes, areas, split, on_close=self._closing())

    def _in_session(
        self, passes: Passes, element_spec: Any, devices: list[str], depth: int
    ) -> tuple[Any, Feeder]:
        if self._wrapped is None or len(devices) > 1:
            raise UsageError("in a v1 graph a StagingInput wraps another input, and has one device")
        batch = [tf.convert_to_tensor(leaf) for leaf in self._wrapped.leaves(self._wrapped.dequeue())]
        stage = SessionStage(flat(element_spec), batch, devices[0], depth)
        endless = Passes(partial(_endless, self._wrapped, stage))
        return stage, Feeder(endless, stage, lambda _: [], on_close=self._closing())

    def _closing(self) -> Callable[[], None] | None:
        return self._wrapped.close if self._wrapped is not None else None

    def _form(self, leaves: Leaves) -> Any:
        if not self._strategy:
            return self.packed(leaves[0])
        columns = zip(*leaves, strict=True)
        return renamed(self.element_spec, [_per_replica(self._strategy, column) for column in columns])

    def _dequeue_op(self, ended: Callable[[int], None]) -> Leaves:
        if isinstance(self._sink, SessionSink):
            return super()._dequeue_op(ended)
        areas: StagingAreas = self._sink  # type: ignore[assignment]
        return areas.dequeue(_replica(self._strategy) if self._strategy else 0, ended)

    def start(self, session: Any) -> None:
        if self._wrapped is not None:
            self._wrapped.start(session)
        super().start(session)

    def as_dataset(self, *, prefetch: int = 1) -> Any:
        if self._strategy:
            raise UsageError(
                "batches on several devices are no dataset; give the wrapped input's dataset to the strategy"
            )
        return super().as_dataset(prefetch=prefetch)


def _endless(wrapped: Input, stage: SessionStage) -> Iterator[None]:
    """Return an endless pass; the stage finds its end. If the last pass was ended early, reset the input."""
    if stage.is_within:
        reset = getattr(wrapped, "reset", None)
        if not callable(reset):
            raise UsageError(f"in a graph a {type(wrapped).__name__} has no epochs that can be left")
        reset()
    return itertools.repeat(None)


def _first_device() -> str:
    gpus = tf.config.list_logical_devices("GPU")
    return gpus[0].name if gpus else "CPU:0"


def _part_of(spec: Any, parts: int) -> Any:
    """The spec of one replica's rows."""
    rows, *sides = spec.shape.as_list() if spec.shape.rank else [None]
    if not spec.shape.rank or parts == 1:
        return spec
    return tf.TensorSpec([rows // parts if rows and rows % parts == 0 else None, *sides], spec.dtype)


def _split(element_spec: Any, parts: int, zero_copy: bool, batch: Any) -> list[Leaves]:
    """Return one list of leaves for each device, with the rows divided as evenly as possible."""
    leaves = tensors_of(element_spec, batch, zero_copy=zero_copy)
    return [[_rows(leaf, part, parts) for leaf in leaves] for part in range(parts)]


def _rows(leaf: Any, part: int, parts: int) -> Any:
    if parts == 1 or not leaf.shape.rank:
        return leaf
    share, more = divmod(int(leaf.shape[0]), parts)
    first = part * share + min(part, more)
    return leaf[first : first + share + (part < more)]


def _per_replica(strategy: Any, values: Sequence[Any]) -> Any:
    remaining = iter(values)
    return strategy.experimental_distribute_values_from_function(lambda _: next(remaining))


def _replica(strategy: Any) -> int:
    """The number, among this machine's replicas, of the replica that is being traced."""
    context = tf.distribute.get_replica_context()
    if context is None or context.strategy is not strategy:
        raise UsageError("with a strategy, dequeue belongs in the function given to strategy.run")
    number = context.replica_id_in_sync_group
    return int(tf.get_static_value(number)) if tf.is_tensor(number) else int(number)
