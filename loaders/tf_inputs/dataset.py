"""Anything that yields batches as a ``tf.data.Dataset``."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..passes import Passes, Source
from .framework import tf
from .gate import weak
from .pulled_passes import PulledPasses
from .queue_input import tensors_of
from .signature import flat, renamed, signature_of
from .tensors import blanks


def to_dataset(source: Source, *, signature: Any = None, prefetch: int = 1) -> Any:
    """A ``tf.data.Dataset`` of the source's batches, for ``model.fit`` and for ``tf.data``'s own steps.

    Each iteration of it is a fresh epoch of the source, whole or left early; beginning one ends the one
    before. ``element_spec`` is the signature; the cardinality is known and asserted where every epoch has the
    same known length. Batches are handed over without a copy where :mod:`.tensors` finds that safe; what
    later steps keep (``cache``, ``shuffle``, ``list(dataset)``) keeps a Loader's slots, which copies from
    then on. ``prefetch`` batches are drawn ahead.

    A source's error comes as TensorFlow's, with its text; ``with original_errors():`` turns it back. For
    ``tf.distribute`` it is not sharded: each worker's loader has its own rank.
    """
    passes = Passes(source)
    element_spec = signature_of(passes, signature)
    dataset = _pulled(PulledPasses(passes), element_spec)
    if (length := passes.steady_length) is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_optimization.inject_prefetch = False  # it draws ahead as far as asked for
    return (dataset.prefetch(prefetch) if prefetch else dataset).with_options(options)


def _pulled(passes: PulledPasses, element_spec: Any) -> Any:
    """One element that begins a pass, then all its batches until it says that there are no more."""
    specs = flat(element_spec)
    make = partial(tensors_of, element_spec, lend=passes.batches_never_change)
    begin_pass, next_batch = weak(passes.begin_for_tensorflow), weak(passes.next_for_tensorflow)

    def begin(_: Any) -> Any:
        return begin_pass()

    def pull(number: Any) -> list[Any]:
        tensors = next_batch(int(number), make)
        return [tf.constant(False), *blanks(specs)] if tensors is None else [tf.constant(True), *tensors]

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
    started.shardprep_passes = passes  # whatever is made of it keeps it
    return started.flat_map(batches)
