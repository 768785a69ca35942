"""This process's rank in distributed training, from a launcher or an initialised framework.

Only frameworks that the program has already imported are asked; nothing is imported here.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from shardprep.formats.errors import UsageError

TRAINERS = ("chief", "master", "worker")  # the task types that train, in rank order; master is TF 1's chief


class ProcessRank(NamedTuple):
    """A rank, a world size, and the name of their source."""

    rank: int
    world_size: int
    source: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} according to {self.source}"


def rank_and_world_size(
    rank: int | None = None, world_size: int | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """Return rank and world size as given, or from an initialised framework, or from a launcher, or (0, 1).

    Raises UsageError for missing, invalid or contradictory values. A process of the launcher may start
    several ranks; then the framework's world size, a multiple of the launcher's, counts.
    """
    if rank is not None or world_size is not None:
        return parse_rank("rank", rank, "world_size", world_size)[:2]
    if ranks := framework_ranks():
        first, *others = ranks
        with suppress(UsageError):  # a framework does not need a complete environment
            launcher = launcher_rank(environ)
            if launcher and (
                first.world_size % launcher.world_size or first.world_size == launcher.world_size
            ):
                others.append(launcher)
        for other in others:
            if other[:2] != first[:2]:
                raise UsageError(f"{first}, but {other}: give the Loader rank= and world_size=")
        return first[:2]
    launcher = launcher_rank(environ)
    return launcher[:2] if launcher else (0, 1)


def refuse_changed_rank(rank: int, world_size: int) -> None:
    """Raise UsageError if a framework that was initialised in the meantime reports another rank."""
    made_for = ProcessRank(rank, world_size, "the Loader, which was made before that")
    for found in framework_ranks():
        if found[:2] != made_for[:2]:
            raise UsageError(
                f"{found}, but {made_for}: make it after the framework is initialised (in Lightning, in "
                "train_dataloader()), or give it rank= and world_size="
            )


def refuse_accelerate(world_size: int) -> None:
    """Raise UsageError within a DataLoader of Accelerate, which would divide one rank's batches again."""
    caller = sys._getframe().f_back if world_size > 1 else None
    while caller:
        # its __init__ begins an iteration, too, for the state of a StatefulDataLoader
        if caller.f_code.co_qualname.startswith("DataLoaderDispatcher."):
            raise UsageError(
                "Accelerate would divide the batches of rank 0 among all ranks, and drop those of "
                "the others: do not give the DataLoader to accelerator.prepare(); the Loader has its own ranks"
            )
        caller = caller.f_back


def framework_ranks() -> list[ProcessRank]:
    """Return the rank of this process in each initialised framework: PyTorch, JAX, TensorFlow."""
    ranks = []
    torch: Any = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        ranks.append(ProcessRank(torch.get_rank(), torch.get_world_size(), "torch.distributed"))
    jax: Any = sys.modules.get("jax")
    is_initialized = getattr(getattr(jax, "distributed", None), "is_initialized", None)  # not before JAX 0.5
    if is_initialized is not None and is_initialized():
        ranks.append(ProcessRank(jax.process_index(), jax.process_count(), "jax.distributed"))
    distribute: Any = getattr(sys.modules.get("tensorflow"), "distribute", None)
    strategy = distribute.get_strategy() if distribute is not None and distribute.has_strategy() else None
    # in all other strategies, one process reads for all
    if strategy is not None and isinstance(strategy, distribute.MultiWorkerMirroredStrategy):
        resolver = strategy.cluster_resolver
        cluster = resolver.cluster_spec()
        sizes = {kind: cluster.num_tasks(kind) for kind in cluster.jobs}
        rank = task_rank(sizes, resolver.task_type, resolver.task_id, source="tf.distribute")
        ranks += [rank] if rank else []
    return ranks


LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH's mpirun_rsh
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),  # MPICH's and Intel MPI's; ranks on a node share one task of Slurm
)
SLURM_STEPS = 0xFFFFFFF0  # step ids from here on are not srun's: the batch script, an interactive shell


def launcher_rank(environ: Mapping[str, str]) -> ProcessRank | None:
    """Return the launcher's rank, None without one. Raises UsageError for a missing or invalid value.

    Slurm counts only within a step: a batch script or salloc's shell has SLURM_NTASKS, but is one process.
    """
    if "RANK" not in environ and "LOCAL_RANK" in environ and "WORLD_SIZE" in environ:
        return _lightning_rank(environ)
    names, step = list(LAUNCHERS), environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and _to_int("SLURM_STEP_ID", step) < SLURM_STEPS:
        # a step may have fewer tasks than the job; older Slurm sets only SLURM_NTASKS
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        names.append(("SLURM_PROCID", size))
    for rank_name, size_name in names:
        if rank_name in environ or size_name in environ:
            return parse_rank(rank_name, environ.get(rank_name), size_name, environ.get(size_name))
    if not environ.get("TF_CONFIG"):
        return None
    try:
        config = json.loads(environ["TF_CONFIG"])
        cluster = config.get("cluster") or {}
        task = config.get("task") or {}
        sizes = {kind: len(tasks) for kind, tasks in cluster.items()}
        kind, index = task.get("type"), task.get("index")
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"TF_CONFIG is not a cluster and a task in JSON: {error}") from error
    return task_rank(sizes, kind, index, source="TF_CONFIG")


def _lightning_rank(environ: Mapping[str, str]) -> ProcessRank:
    """Return the rank of a process started by Lightning's own launcher, which counts node by node."""
    node = environ.get("NODE_RANK", environ.get("GROUP_RANK", "0"))
    local, world_size = environ["LOCAL_RANK"], environ["WORLD_SIZE"]
    if node == "0":
        return parse_rank("LOCAL_RANK", local, "WORLD_SIZE", world_size)
    per_node = environ.get("LOCAL_WORLD_SIZE", "")
    if not all(number.isdecimal() for number in (node, local, per_node)):
        raise UsageError(
            f"NODE_RANK={node}, LOCAL_RANK={local} and WORLD_SIZE={world_size} do not determine this process's rank: set "
            "LOCAL_WORLD_SIZE too, or make the Loader once torch.distributed is initialised (in Lightning, in "
            "train_dataloader()), or give it rank= and world_size="
        )
    rank = _to_int("NODE_RANK", node) * _to_int("LOCAL_WORLD_SIZE", per_node) + _to_int("LOCAL_RANK", local)
    return parse_rank("NODE_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK", rank, "WORLD_SIZE", world_size)


def task_rank(
    sizes: Mapping[str, int], kind: str | None, index: int | None, *, source: str
) -> ProcessRank | None:
    """Return the rank of a task of a TensorFlow cluster: the chief first, then the workers.

    None for an evaluator or without a cluster. Raises UsageError for a task that does not train.
    """
    if not sizes or kind == "evaluator":
        return None
    if kind not in TRAINERS:
        raise UsageError(f"{source} has the task type {kind!r}: only {', '.join(TRAINERS)} read data")
    trainers = [sizes.get(name, 0) for name in TRAINERS]
    place = TRAINERS.index(kind)
    if not isinstance(index, int) or not 0 <= index < trainers[place]:
        raise UsageError(f"{source} has the task {kind} {index!r} in a cluster of {trainers[place]}")
    return ProcessRank(sum(trainers[:place]) + index, sum(trainers), source)


def parse_rank(rank_name: str, rank: int | str | None, size_name: str, size: int | str | None) -> ProcessRank:
    """Return the rank of two named values. Raises UsageError for a missing or invalid value."""
    for name, value, other in ((rank_name, rank, size_name), (size_name, size, rank_name)):
        if value is None:
            raise UsageError(f"{other} is set but {name} is not: set both or neither")
    number, count = _to_int(rank_name, rank), _to_int(size_name, size)
    if count < 1:
        raise UsageError(f"{size_name} must be at least 1, not {count}")
    if not 0 <= number < count:
        raise UsageError(f"{rank_name} must be from 0 to {count - 1} ({size_name} is {count}), not {number}")
    return ProcessRank(number, count, f"{rank_name} and {size_name}")


def _to_int(name: str, value: int | str | None) -> int:
    with suppress(TypeError, ValueError):  # Python converts at most 4,300 digits
        number = int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
        if number.bit_length() < 64:
            return number
    raise UsageError(f"{name} must be a whole number, not {value!r}")
