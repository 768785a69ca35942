"""The check of a file in separate processes: a crash is a finding for the container, or for one image."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

from shardprep.formats.images.decode_check import crashes_decoder
from shardprep.formats.processes.child_process import Child, ChildDied, ChildLost
from shardprep.formats.system.owned import Owned

from .check import Check, Checked

P = ParamSpec("P")
T = TypeVar("T")


class IsolatedChecks(Owned, AbstractContextManager["IsolatedChecks"]):
    """Checks of files, each call in a separate process. Thread-safe; :meth:`end` kills the processes.

    A process is used again only if it found nothing: a damaged file may leave a library in disorder.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self._idle: list[Child] = []
        self._has_ended = False

    def check(self, check: Check, timeout_s: float) -> Checked:
        """Return the findings of a check, with the images that crash the decoder.

        Raises ChildDied if reading the records crashes, ChildLost if a process is killed or takes longer,
        and OperationError if the system allows no further process.
        """
        try:
            return self._isolated(timeout_s, check.found)
        except ChildDied:
            if not check.decode:
                raise
        found = self._isolated(timeout_s, check.without_decoding().found)
        decoded = self._decoded(check, range(check.records), timeout_s)
        if not decoded.problems:
            decoded.notes.append((None, "the decoder crashed over its images together, and over none alone"))
        found.add(decoded)
        return found

    def end(self) -> None:
        """Kill the processes at work; later calls raise ChildLost. May be called from any thread."""
        with self._lock:
            self._has_ended = True
            for child in self._running:
                child.kill()

    def _decoded(self, check: Check, ordinals: range, timeout_s: float) -> Checked:
        """Decode these images in one process; if it crashes, each half of them in another one."""
        try:
            return self._isolated(timeout_s, check.decoded, ordinals)
        except ChildDied as error:
            if len(ordinals) == 1:
                key = self._isolated(timeout_s, check.key_of, ordinals[0])
                return Checked(problems=[(key, crashes_decoder(error.signal))])
        half = len(ordinals) // 2
        found = self._decoded(check, ordinals[:half], timeout_s)
        found.add(self._decoded(check, ordinals[half:], timeout_s))
        return found

    def _isolated(self, seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        child = self._taken()
        is_clean = False
        try:
            made = child.call_within(seconds, call, *args, **kwargs)
            is_clean = isinstance(made, Checked) and made.found_nothing
            return made
        finally:
            self._give_back(child, is_clean=is_clean)

    def _taken(self) -> Child:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or Child()
        with self._lock:
            if not self._has_ended:
                self._running.add(child)
                return child
        child.__exit__(None, None, None)
        raise ChildLost("the verification was ended")

    def _give_back(self, child: Child, *, is_clean: bool) -> None:
        with self._lock:
            self._running.remove(child)
            if is_clean and not self._has_ended:
                self._idle.append(child)
                return
        child.__exit__(None, None, None)

    def __exit__(self, *exc: object) -> None:
        self.end()
        for child in self._idle:
            child.__exit__(*exc)
        self._idle.clear()


def isolated_check(check: Check, timeout_s: float) -> Checked:
    """Return what :meth:`IsolatedChecks.check` does, in processes that end with the call."""
    with IsolatedChecks() as checks:
        return checks.check(check, timeout_s)
