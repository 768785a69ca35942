"""The environment variables by which launchers tell a process its rank."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shardprep.formats.errors import UsageError

from .process_rank import ProcessRank, checked_rank, rank_of_task

LAUNCHERS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
SLURM_STEPS = 0xFFFFFFF0  # step ids from here on are not srun's: the batch script, an interactive shell


def launched_rank(environ: Mapping[str, str]) -> ProcessRank | None:
    """Return what the launcher set, None where it set nothing.

    The first of these that is set is used: RANK and WORLD_SIZE, Lightning's, Open MPI's, an srun step's of
    Slurm, TF_CONFIG. Slurm counts only within a step: a batch script or the shell of salloc has SLURM_NTASKS
    too, but is one process. Raises UsageError where a value is missing or invalid.
    """
    if _is_lightning(environ):
        return _lightning(environ)
    for rank_name, size_name in (*LAUNCHERS, *_slurm_names(environ)):
        if rank_name in environ or size_name in environ:
            return checked_rank(rank_name, environ.get(rank_name), size_name, environ.get(size_name))
    if environ.get("TF_CONFIG"):
        return _tf_config(environ["TF_CONFIG"])
    return None


def _is_lightning(environ: Mapping[str, str]) -> bool:
    return "RANK" not in environ and "LOCAL_RANK" in environ and "WORLD_SIZE" in environ


def _lightning(environ: Mapping[str, str]) -> ProcessRank:
    """The rank of a process that Lightning's own launcher started: node by node."""
    node = environ.get("NODE_RANK", environ.get("GROUP_RANK", "0"))
    local, world_size = environ["LOCAL_RANK"], environ["WORLD_SIZE"]
    if node == "0":
        return checked_rank("LOCAL_RANK", local, "WORLD_SIZE", world_size)
    per_node = environ.get("LOCAL_WORLD_SIZE", "")
    if not all(number.isdecimal() for number in (node, local, per_node)):
        raise UsageError(
            f"NODE_RANK={node}, LOCAL_RANK={local} and WORLD_SIZE={world_size} do not say this process's rank: set "
            "LOCAL_WORLD_SIZE too, or make the Loader once torch.distributed is initialised (in Lightning, in "
            "train_dataloader()), or give it rank= and world_size="
        )
    rank = int(node) * int(per_node) + int(local)
    return checked_rank("NODE_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK", rank, "WORLD_SIZE", world_size)


def _slurm_names(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= SLURM_STEPS:
        return ()
    # A step may have fewer tasks than the job; older Slurm has only SLURM_NTASKS.
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    return (("SLURM_PROCID", size),)


def _tf_config(text: str) -> ProcessRank | None:
    """Return the task's rank; None for an evaluator, and where there is no cluster."""
    try:
        config = json.loads(text)
        cluster = config.get("cluster") or {}
        task = config.get("task") or {}
        sizes = {kind: len(tasks) for kind, tasks in cluster.items()}
        kind, index = task.get("type"), task.get("index")
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"TF_CONFIG is not a cluster and a task in JSON: {error}") from error
    return rank_of_task(sizes, kind, index, said_by="TF_CONFIG")
