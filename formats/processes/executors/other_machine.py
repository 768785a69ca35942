"""A machine of an executor that differs from the one of the call."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from shardprep.formats.errors import OperationError


class OtherMachine(OperationError):
    """A machine that sees another source or output, or has other versions of libraries; ``host`` names it."""

    host = ""


def other_machine(text: str, path: str | os.PathLike[str] | None = None) -> OtherMachine:
    """Return the error that says ``text`` of this machine."""
    host = socket.gethostname()
    error = OtherMachine(f"the machine {host} {text}", path=path)
    error.host = host
    return error


def refuse_other_versions(home: Mapping[str, str], here: Mapping[str, str], work: str) -> None:
    """Raise OtherMachine if these versions ``here`` are not those of the machine that began the ``work``."""
    differing = [name for name in {**home, **here} if home.get(name) != here.get(name)]
    if differing:
        theirs, ours = (", ".join(f"{n} {v.get(n, 'none')}" for n in differing) for v in (home, here))
        raise other_machine(f"has {ours}, and the {work} was begun with {theirs}; install these there")
