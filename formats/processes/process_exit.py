"""The exit of another process, as the kernel reports it, not as the end of a pipe to it.

A pipe or socket stays open while any process has it, for example one that the process forked.
"""

from __future__ import annotations

import os
import select
import threading

from shardprep.formats.system.descriptor import Descriptor

from .thread_start import starting_thread

PARENT_POLL_MS = 1000  # between two checks of the parent, on systems without pidfd


def exit_descriptor(pid: int) -> Descriptor:
    """Return a pidfd, which is readable once the process has exited; a closed descriptor without pidfd."""
    try:
        return Descriptor(os.pidfd_open(pid))
    except (AttributeError, OSError):  # not Linux, too old, forbidden; or the process was reaped
        return Descriptor(-1)


def exists(pid: int) -> bool:
    """Whether the process exists, including one that has exited and was not reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end_with_parent(parent: int, connection: int) -> None:
    """Start a daemon thread that ends this process once its parent has exited or closed the connection.

    ``connection`` is the descriptor of a socket to the parent. PR_SET_PDEATHSIG is about the thread that
    started this process, not about the parent. Raises OperationError if the system allows no further thread.
    """
    thread = threading.Thread(target=_watch, args=(parent, connection), name="shardprep-parent", daemon=True)
    with starting_thread():
        thread.start()


def _watch(parent: int, connection: int) -> None:
    poller = select.poll()
    poller.register(connection, 0)  # without events, only POLLHUP and errors are reported
    exited = exit_descriptor(parent)
    if exited.fileno() >= 0:
        poller.register(exited, select.POLLIN)
    # checked after pidfd_open: if the parent had exited, its number may be another process's
    while os.getppid() == parent and not poller.poll(PARENT_POLL_MS):
        pass
    os._exit(1)
