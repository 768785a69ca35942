"""The frameworks that are initialised in this process for training in several, and the rank that each knows.

A framework is asked only where the program has imported it; nothing is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from .process_rank import ProcessRank, rank_of_task


def process_groups() -> list[ProcessRank]:
    """Return the rank of this process in each framework that is initialised: PyTorch, JAX, TensorFlow."""
    return [*_torch(), *_jax(), *_tensorflow()]


def _torch() -> Iterator[ProcessRank]:
    group: Any = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        yield ProcessRank(group.get_rank(), group.get_world_size(), "torch.distributed")


def _jax() -> Iterator[ProcessRank]:
    jax: Any = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)  # not before JAX 0.5
    if is_initialized is not None and is_initialized():
        yield ProcessRank(jax.process_index(), jax.process_count(), "jax.distributed")


def _tensorflow() -> Iterator[ProcessRank]:
    """The rank under a current MultiWorkerMirroredStrategy; in other strategies one process reads for all."""
    distribute: Any = getattr(sys.modules.get("tensorflow"), "distribute", None)
    if distribute is None or not distribute.has_strategy():
        return
    strategy = distribute.get_strategy()
    if isinstance(strategy, distribute.MultiWorkerMirroredStrategy):
        resolver = strategy.cluster_resolver
        cluster = resolver.cluster_spec()
        sizes = {kind: cluster.num_tasks(kind) for kind in cluster.jobs}
        rank = rank_of_task(sizes, resolver.task_type, resolver.task_id, said_by="tf.distribute")
        yield from [rank] if rank else []
