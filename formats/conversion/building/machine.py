"""What a machine must have in common with the one that planned a shard, to build it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from importlib.metadata import version
from pathlib import Path

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.containers.registry import container
from shardprep.formats.errors import BadImage, OperationError, SourceDamaged
from shardprep.formats.sources.listing.source import ByteReader, Entries

from .plan import PlanOptions


class OtherMachine(OperationError):
    """A machine that sees another source or output, or has other versions of libraries; ``host`` names it."""

    host = ""


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
    here = versions_for(options)
    differing = [name for name in {**home, **here} if home.get(name) != here.get(name)]
    if differing:
        theirs, ours = (", ".join(f"{n} {v.get(n, 'none')}" for n in differing) for v in (home, here))
        raise _other(f"has {ours}, and the conversion was begun with {theirs}; install these there")
    if not run.is_dir():
        raise _other("does not see the output, or its run has ended; mount it there at the same path", run)
    try:
        with copy(reader) as opened, suppress(BadImage, BadValue):
            opened.read(entries[0])
    except (SourceDamaged, OSError) as error:
        raise _other(
            f"does not see the source as it was listed ({error}); mount the same there at the same path"
        ) from error


def _other(text: str, path: Path | None = None) -> OtherMachine:
    host = socket.gethostname()
    error = OtherMachine(f"the machine {host} {text}", path=path)
    error.host = host
    return error
