"""What an interruption leaves finished, for its message."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardprep.formats.dataset.manifest import MANIFEST_NAME

from .plan import PlannedShard
from .work_folder import finished_shards

Shards = Sequence[PlannedShard]


@contextmanager
def noting_kept(kept: Callable[[], str], command: str = "the same command") -> Iterator[None]:
    """Add to an interruption, such as KeyboardInterrupt, a note of what the next run keeps.

    ``kept`` says that; an empty text, and an error, add no note. ``command`` is what goes on from there.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as interruption:
        if text := kept():
            interruption.add_note(f"{text}; {command} goes on from there")
        raise


def converted(begun: Mapping[Path, Shards], splits: Mapping[Path, str]) -> str:
    """Return how many of the shards of each begun split are done; empty if none is.

    ``begun`` has the planned shards by output, and ``splits`` the name of each output's split.
    """
    parts = []
    for output, shards in begun.items():
        done = len(shards) if (output / MANIFEST_NAME).exists() else _commits(output, shards)
        if done:
            parts.append(
                f"{done} of {len(shards)} shards" + (f" of {splits[output]}" if len(splits) > 1 else "")
            )
    return f"{', '.join(parts)} are done" if parts else ""


def rebuilt(dataset: Path, shards: Shards) -> str:
    """Return how many of the shards to repair are rebuilt; empty if none is."""
    done = _commits(dataset, shards)
    return f"{done} of {len(shards)} shards are rebuilt" if done else ""


def _commits(output: Path, shards: Shards) -> int:
    return len(finished_shards(output) & {shard.name for shard in shards})
