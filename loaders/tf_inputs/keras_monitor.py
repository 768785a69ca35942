"""The occupancy of inputs in Keras' logs and in TensorBoard's files."""

from __future__ import annotations

from typing import Any

from shardprep.loaders.tf_inputs.feeding.stats import InputStats
from shardprep.loaders.tf_inputs.tensors.framework import tf

from .input import Input

SCALARS = b"scalars"  # the name of TensorBoard's plugin for scalars


class InputMonitor(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """A Keras callback that logs after each epoch how full the ``inputs`` were during it.

    It adds ``<name>/level``, ``<name>/starved`` and ``<name>/blocked`` to ``logs``, and so to the history,
    with the keyword names of the inputs. With ``writer``, from ``tf.summary.create_file_writer``, it writes
    them as scalars, too; that does not need the ``tensorboard`` package.
    """

    def __init__(self, *, writer: Any = None, **inputs: Input) -> None:
        super().__init__()
        self._inputs = inputs
        self._writer = writer
        self._before: dict[str, InputStats] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._before = {name: each.stats() for name, each in self._inputs.items()}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        for name, each in self._inputs.items():
            epoch_stats = each.stats().since(self._before[name])
            scalars = {
                f"{name}/level": epoch_stats.mean_level,
                f"{name}/starved": epoch_stats.starved,
                f"{name}/blocked": epoch_stats.blocked,
            }
            if logs is not None:
                logs.update(scalars)
            if self._writer is not None:
                write_scalars(self._writer, scalars, step=epoch)


def write_scalars(writer: Any, scalars: dict[str, float], *, step: int) -> None:
    """Write scalars for TensorBoard, without its package."""
    metadata = tf.compat.v1.SummaryMetadata(
        plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name=SCALARS)
    )
    with writer.as_default():
        for tag, value in scalars.items():
            tf.summary.write(tag, tf.constant(value, tf.float32), step=step, metadata=metadata)
    writer.flush()
