"""What a machine must have in common with the one that planned a shard, to build it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from importlib.metadata import version
from pathlib import Path

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.containers.registry import container
from shardprep.formats.errors import BadImage, SourceDamaged
from shardprep.formats.processes.executors.other_machine import other_machine, refuse_other_versions
from shardprep.formats.sources.listing.source import ByteReader, Entries

from .plan import PlanOptions


def versions_for(options: PlanOptions) -> dict[str, str]:
    """Return the versions and settings of this machine that decide the bytes of shards with these options."""
    found = {"shardprep": version("shardprep")}
    found |= {name: str(value) for name, value in container(options.container).library().items()}
    return found | ({"transcoder": options.transcoder} if options.transcodes else {})


def check_machine(
    home: Mapping[str, str], options: PlanOptions, run: Path, reader: ByteReader, entries: Entries
) -> None:
    """Raise OtherMachine unless this machine can build a shard to the bytes of the one that planned it.

    ``home`` has that machine's versions, and ``run`` is a folder that it made. The first entry is read.
    """
    refuse_other_versions(home, versions_for(options), "conversion")
    if not run.is_dir():
        raise other_machine(
            "does not see the output, or its run has ended; mount it there at the same path", run
        )
    try:
        with copy(reader) as opened, suppress(BadImage, BadValue):
            opened.read(entries[0])
    except (SourceDamaged, OSError) as error:
        raise other_machine(
            f"does not see the source as it was listed ({error}); mount the same there at the same path"
        ) from error
