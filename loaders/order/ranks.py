"""This process's rank in the training, and the number of ranks."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping

from shardprep.formats.errors import UsageError

LAUNCHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
SLURM_STEPS = 0xFFFFFFF0  # step ids from here on are not srun's: the batch script, an interactive shell
TRAINERS = ("chief", "master", "worker")  # the task types that train, in rank order; master is TF 1's chief


def rank_and_world_size(
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[int, int]:
    """Return rank and world size as given, else from the launcher's environment, else (0, 1).

    The first of these that is set is used: RANK and WORLD_SIZE, Open MPI, an srun step of Slurm, TF_CONFIG.
    Slurm counts only within a step: a batch script or the shell of salloc has SLURM_NTASKS too, but is one
    process. Raises UsageError where a value is missing or invalid.
    """
    if rank is not None or world_size is not None:
        return _pair("rank", rank, "world_size", world_size)
    for rank_name, size_name in (*LAUNCHERS, *_slurm_names(environ)):
        if rank_name in environ or size_name in environ:
            return _pair(rank_name, environ.get(rank_name), size_name, environ.get(size_name))
    if environ.get("TF_CONFIG"):
        return _tf_config(environ["TF_CONFIG"])
    return 0, 1


def _slurm_names(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= SLURM_STEPS:
        return ()
    # A step may have fewer tasks than the job; older Slurm has only SLURM_NTASKS.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return (("SLURM_PROCID", size),)


def _pair(rank_name: str, rank: int | str | None, size_name: str, size: int | str | None) -> tuple[int, int]:
    for name, value, other in ((rank_name, rank, size_name), (size_name, size, rank_name)):
        if value is None:
            raise UsageError(f"{other} is set but {name} is not: set both or neither")
    number, count = _number(rank_name, rank), _number(size_name, size)
    if count < 1:
        raise UsageError(f"{size_name} must be at least 1, not {count}")
    if not 0 <= number < count:
        raise UsageError(f"{rank_name} must be from 0 to {count - 1} ({size_name} is {count}), not {number}")
    return number, count


def _number(name: str, value: int | str | None) -> int:
    try:
        return int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None


def _tf_config(text: str) -> tuple[int, int]:
    """Rank the chief first, then the workers. An evaluator, or a config without a cluster, is (0, 1)."""
    try:
        config = json.loads(text)
        cluster = config.get("cluster") or {}
        task = config.get("task") or {}
        sizes = {kind: len(cluster.get(kind, ())) for kind in TRAINERS}
        kind, index = task.get("type"), task.get("index")
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"TF_CONFIG is not a cluster and a task in JSON: {error}") from error
    if not cluster or kind == "evaluator":
        return 0, 1
    if kind not in TRAINERS:
        raise UsageError(f"TF_CONFIG has the task type {kind!r}: only {', '.join(TRAINERS)} read data")
    if not isinstance(index, int) or not 0 <= index < sizes[kind]:
        raise UsageError(f"TF_CONFIG has the task {kind} {index!r} in a cluster of {sizes[kind]}")
    before = TRAINERS[: TRAINERS.index(kind)]
    return sum(sizes[k] for k in before) + index, sum(sizes.values())
