"""The check of a shard in separate processes: a crash is a finding for the container, or for one image."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

from shardprep.formats.images.decode_check import crashes_decoder
from shardprep.formats.processes.child_process import Child, ChildDied, ChildLost

from .shard_check import (
    Checked,
    ShardCheck,
    check_decoding,
    check_shard,
    key_of_record,
)

P = ParamSpec("P")
T = TypeVar("T")


class IsolatedChecks:
    """Checks of shards, each call in a separate process. Thread-safe; :meth:`end` kills the processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self._has_ended = False

    def check(self, check: ShardCheck, timeout_s: float) -> Checked:
        """Return the findings of :func:`.shard_check.check_shard`, with the images that crash the decoder.

        Raises ChildDied if reading the records crashes, ChildLost if a process is killed or takes longer,
        and OperationError if the system allows no further process.
        """
        try:
            return self._isolated(timeout_s, check_shard, check)
        except ChildDied:
            if not check.decode:
                raise
        found = self._isolated(timeout_s, check_shard, replace(check, decode=False))
        decoded = self._decoded(replace(check, rows=None), range(check.records), timeout_s)
        if not decoded.problems:
            decoded.notes.append((None, "the decoder crashed over its images together, and over none alone"))
        found.add(decoded)
        return found

    def end(self) -> None:
        """Kill the processes; later calls raise ChildLost. May be called from any thread."""
        with self._lock:
            self._has_ended = True
            for child in self._running:
                child.kill()

    def _decoded(self, check: ShardCheck, ordinals: range, timeout_s: float) -> Checked:
        """Decode these images in one process; if it crashes, each half of them in another one."""
        try:
            return self._isolated(timeout_s, check_decoding, check, ordinals)
        except ChildDied as error:
            if len(ordinals) == 1:
                key = self._isolated(timeout_s, key_of_record, check, ordinals[0])
                return Checked(problems=[(key, crashes_decoder(error.signal))])
        half = len(ordinals) // 2
        found = self._decoded(check, ordinals[:half], timeout_s)
        found.add(self._decoded(check, ordinals[half:], timeout_s))
        return found

    def _isolated(self, seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        with Child() as child:
            with self._lock:
                if self._has_ended:
                    raise ChildLost("the verification was ended")
                self._running.add(child)
            try:
                return child.call_within(seconds, call, *args, **kwargs)
            finally:
                with self._lock:
                    self._running.remove(child)
