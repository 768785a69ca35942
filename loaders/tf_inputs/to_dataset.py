"""Sources of batches as a ``tf.data.Dataset``."""

from __future__ import annotations

from functools import partial
from typing import Any

from shardprep.loaders.batching.passes import Passes, Source
from shardprep.loaders.tf_inputs.feeding.end_of_epoch import weak
from shardprep.loaders.tf_inputs.feeding.pulled_passes import PulledPasses
from shardprep.loaders.tf_inputs.tensors.framework import tf
from shardprep.loaders.tf_inputs.tensors.signature import flat, renamed, signature_of
from shardprep.loaders.tf_inputs.tensors.tensors import empty_tensors, tensors_of


def to_dataset(source: Source, *, signature: Any = None, prefetch: int = 1) -> Any:
    """Return a ``tf.data.Dataset`` of the source's batches, for ``model.fit`` and ``tf.data``'s own steps.

    ``source`` and ``signature`` are as for :class:`.QueueInput`; the signature becomes ``element_spec``.
    ``prefetch`` is the number of batches that are drawn ahead, 0 for none. Each iteration of the dataset is a
    new epoch of the source, and ends the epoch before. The cardinality is set and asserted where every epoch
    has the same known length. Batches are not copied where :mod:`.tensors` finds that safe. Steps that keep
    batches (``cache``, ``shuffle``, ``list(dataset)``) keep a Loader's slots; the Loader copies from then on.

    A source's error is raised as TensorFlow's, with its text; ``with original_errors():`` raises the
    original. For ``tf.distribute`` the dataset is not sharded: each worker's loader has its own rank. Raises
    UsageError where the signature is neither given nor known.
    """
    passes = Passes(source)
    element_spec = signature_of(passes, signature)
    dataset = _pulled(PulledPasses(passes), element_spec)
    if (length := passes.steady_length) is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False  # only ``prefetch`` batches are drawn ahead
    return (dataset.prefetch(prefetch) if prefetch else dataset).with_options(options)


def _pulled(passes: PulledPasses, element_spec: Any) -> Any:
    """Return a dataset of one element that begins a pass, flat-mapped to the batches of the pass."""
    specs = flat(element_spec)
    make = partial(tensors_of, element_spec, zero_copy=passes.batches_never_change)
    begin_pass, next_batch = weak(passes.begin_for_tensorflow), weak(passes.next_for_tensorflow)

    def begin(_: Any) -> Any:
        return begin_pass()

    def pull(number: Any) -> list[Any]:
        tensors = next_batch(int(number), make)
        return (
            [tf.constant(False), *empty_tensors(specs)] if tensors is None else [tf.constant(True), *tensors]
        )

    def pulled(number: Any) -> Any:
        more, *leaves = tf.py_function(pull, [number], [tf.bool, *(spec.dtype for spec in specs)])
        more.set_shape([])
        return more, *leaves

    def batch_of(_: Any, *leaves: Any) -> Any:
        for leaf, spec in zip(leaves, specs, strict=True):
            leaf.set_shape(spec.shape)
        return renamed(element_spec, list(leaves))

    def batches(number: Any) -> Any:
        counter = tf.data.Dataset.counter().map(lambda _: pulled(number))
        return counter.take_while(lambda more, *_: more).map(batch_of)

    started = tf.data.Dataset.from_tensors(0).map(lambda x: tf.numpy_function(begin, [x], tf.int64))
    started.shardprep_passes = passes  # datasets that are made from this one keep it alive
    return started.flat_map(batches)
