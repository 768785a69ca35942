"""Logging of how full inputs are, to Keras and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.frameworks.tensors import tf
from shardprep.loaders.frameworks.tf_inputs import Input
from shardprep.loaders.frameworks.tf_stats import InputStats, occupancy_of, scalars_of


class InputMonitor(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that logs after each epoch how full the inputs were.

    It adds ``<name>/level``, ``<name>/starved`` and ``<name>/blocked`` to ``logs``, and so to the history.

    Args:
        writer: From ``tf.summary.create_file_writer``: also writes these as scalars, with
            ``<name>/images_per_second`` (``batches_per_second`` if the source is not a Loader) and
            ``<name>/stage/<stage>``, the fraction of time in which each stage works. This does not need the
            ``tensorboard`` package.
        every: Training steps between scalars, whose step is then the optimizer's ``iterations``, as for
            scalars of the training itself, and continues after a checkpoint. None writes scalars once per
            epoch, with its number as the step.
        inputs: The inputs, by their names in the logs.

    Raises:
        UsageError: ``every`` is below 1, or given without a writer; or one of ``inputs`` is no input.
    """

    def __init__(self, *, writer: Any = None, every: int | None = None, **inputs: Input) -> None:
        super().__init__()
        if every is not None and (every < 1 or writer is None):
            raise UsageError(f"every={every!r}: give a number of steps of at least 1, and a writer")
        if wrong := {name: each for name, each in inputs.items() if not isinstance(each, Input)}:
            raise UsageError(f"{wrong}: give an input, such as a QueueInput over it")
        self._inputs = inputs
        self._writer = writer
        self._every = every
        self._before_epoch: dict[str, InputStats] = {}
        self._before_steps: dict[str, InputStats] = {}
        self._epoch_began = self._written = 0  # in iterations; the latter, of the last scalars

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._written = self._iterations
        self._before_steps = self._stats()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch_began = self._iterations  # read once per epoch, as reading may wait for the device
        self._before_epoch = self._stats()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        step = self._epoch_began + batch + 1
        if self._every and step >= self._written + self._every:
            self._written = step
            self._write(self._since(self._before_steps), step=step)
            self._before_steps = self._stats()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        stats = self._since(self._before_epoch)
        if logs is not None:
            logs.update(_by_tag(stats, occupancy_of))
        if self._writer is not None and self._every is None:
            self._write(stats, step=epoch)

    def _write(self, stats: dict[str, InputStats], *, step: int) -> None:
        """Write scalars for TensorBoard, without its package."""
        plugin_data = tf.compat.v1.SummaryMetadata.PluginData(plugin_name=b"scalars")
        metadata = tf.compat.v1.SummaryMetadata(plugin_data=plugin_data)
        with self._writer.as_default():
            for tag, value in _by_tag(stats, scalars_of).items():
                tf.summary.write(tag, tf.constant(value, tf.float32), step=step, metadata=metadata)
        self._writer.flush()

    def _stats(self) -> dict[str, InputStats]:
        return {name: each.stats() for name, each in self._inputs.items()}

    def _since(self, before: dict[str, InputStats]) -> dict[str, InputStats]:
        return {name: now.since(before[name]) for name, now in self._stats().items()}

    @property
    def _iterations(self) -> int:
        """Training steps since the model was made; one execution may run several."""
        return int(self.model.optimizer.iterations)


def _by_tag(stats: dict[str, InputStats], of: Callable[[InputStats], dict[str, float]]) -> dict[str, float]:
    return {f"{name}/{part}": value for name, each in stats.items() for part, value in of(each).items()}
