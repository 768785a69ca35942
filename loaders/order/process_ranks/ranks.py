"""This process's rank in the training, and the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise

from shardprep.formats.errors import UsageError

from .launchers import launched_rank
from .process_groups import process_groups
from .process_rank import ProcessRank, checked_rank


def rank_and_world_size(
    rank: int | None = None,
    world_size: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> tuple[int, int]:
    """Return rank and world size as given, else as an initialised framework or a launcher says, else (0, 1).

    Given values are taken as they are. Else an initialised ``torch.distributed`` or ``jax.distributed``, or a
    current ``MultiWorkerMirroredStrategy``, is asked, where it is imported already, and then the environment:
    RANK and WORLD_SIZE, Lightning's LOCAL_RANK, Open MPI, an srun step of Slurm, TF_CONFIG. Raises UsageError
    where a value is missing or invalid, and where two of them contradict each other. A launcher's process may
    start several ranks: then the framework's world size is a multiple of the environment's, and counts.
    """
    if rank is not None or world_size is not None:
        return checked_rank("rank", rank, "world_size", world_size)[:2]
    if groups := process_groups():
        return _agreed(groups, _launched_or_none(environ))[:2]
    launched = launched_rank(environ)
    return launched[:2] if launched else (0, 1)


def refuse_other_rank(rank: int, world_size: int) -> None:
    """Raise UsageError where a framework that was initialised in the meantime says another rank."""
    made_for = ProcessRank(rank, world_size, "the Loader, which was made before that,")
    for group in process_groups():
        if not group.is_same(made_for):
            raise UsageError(
                f"{group}, but {made_for}: make it after the framework is initialised (in Lightning, in "
                "train_dataloader()), or give it rank= and world_size="
            )


def _agreed(groups: Sequence[ProcessRank], launched: ProcessRank | None) -> ProcessRank:
    for one, other in pairwise(groups):
        if not one.is_same(other):
            raise _contradiction(one, other)
    if launched and not launched.is_same(groups[0]) and not launched.may_have_started(groups[0]):
        raise _contradiction(groups[0], launched)
    return groups[0]


def _contradiction(one: ProcessRank, other: ProcessRank) -> UsageError:
    return UsageError(f"{one}, but {other}: give the Loader rank= and world_size=")


def _launched_or_none(environ: Mapping[str, str]) -> ProcessRank | None:
    """What the launcher set, None where that is incomplete, as a framework does not need it."""
    try:
        return launched_rank(environ)
    except UsageError:
        return None
