"""The trace of an engine: its workers' leases and its consumer's waits, as a Chrome trace."""

from __future__ import annotations

import json
import os
from bisect import bisect
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.runtime.files import save_bytes
from shardprep.formats.runtime.user_paths import user_path
from shardprep.loaders.engine.leases import Lease
from shardprep.loaders.engine.messages import Clock

KEEP = 200_000  # spans of each kind, about 100 MB of JSON; long runs keep the last ones
LARGEST_TRACE = 256 << 20  # bytes of such a file

CONSUMER = 0  # the consumer's track; the workers' tracks follow


class LeaseSpan(NamedTuple):
    """The time of one lease: ``rows`` rows of a batch, from row ``first`` on, with seconds per stage."""

    worker: int
    run: int
    batch: int
    first: int
    rows: int
    began: float
    ended: float
    stages: tuple[float, ...]


class BatchWait(NamedTuple):
    """A batch that the consumer requested at ``began``, received at ``got`` and could use at ``ended``."""

    run: int
    batch: int
    rows: int
    began: float
    got: float
    ended: float


Event = dict[str, Any]


def _track_ids(track: int) -> Event:
    return {"pid": os.getpid(), "tid": track}


class Trace:
    """The result of :func:`tracing`: the last ``keep`` spans of each kind, ordered by their ends.

    Times are ``time.perf_counter`` of this process. A lease begins when the worker has received it and
    finished the previous one, and ends when its answer is read. The seconds of its stages are exact to within
    a row.
    """

    def __init__(self, clock: Clock, stages: tuple[str, ...], *, keep: int = KEEP) -> None:
        self.stages = stages
        self.leases: deque[LeaseSpan] = deque(maxlen=keep)
        self.receptions: deque[BatchWait] = deque(maxlen=keep)
        self.ready: deque[tuple[float, int]] = deque(maxlen=keep)  # (time, number of ready batches)
        self.pauses: deque[float] = deque(maxlen=keep)
        self.began = perf_counter()
        self._clock = clock
        self._last_clock = clock.copy()
        self._free_since = [self.began] * len(clock)
        self._sent_at: dict[int, float] = {}  # by lease

    def record_sent(self, lease: Lease) -> None:
        """Record that the lease was sent to a worker, perhaps again."""
        self._sent_at[lease.id] = perf_counter()

    def record_finished(self, worker: int, lease: Lease) -> None:
        """Record that the worker has finished the lease; one sent before the trace began is left out."""
        now, began, stages = perf_counter(), self._free_since[worker], self._stage_seconds(worker)
        self._free_since[worker] = now
        if (sent := self._sent_at.pop(lease.id, None)) is not None:
            place = worker, lease.run, lease.batch, lease.first, len(lease.items)
            self.leases.append(LeaseSpan(*place, max(sent, began), now, stages))

    def record_filled(self, wait: BatchWait) -> None:
        """Record that the consumer's thread has filled the batch."""
        place = 0, wait.run, wait.batch, 0, wait.rows
        self.leases.append(LeaseSpan(*place, wait.began, wait.ended, self._stage_seconds(0)))
        self.receptions.append(wait)

    def record_received(self, reception: BatchWait, ready: int) -> None:
        """Record that the consumer has the batch, and how many more are ready."""
        self.receptions.append(reception)
        self.ready.append((reception.got, ready))

    def record_delivered(self, ready: int) -> None:
        """Record how many batches are ready after one was added."""
        self.ready.append((perf_counter(), ready))

    def _stage_seconds(self, worker: int) -> tuple[float, ...]:
        now = self._clock[worker].copy()
        spent = np.maximum(0.0, now - self._last_clock[worker])
        self._last_clock[worker] = now
        return tuple(spent.tolist())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

        Raises OperationError if ``path`` is not a regular file, OSError.
        """
        events = sorted(self.events(), key=lambda event: (event.get("ts", -1), -event.get("dur", 0)))
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        save_bytes(user_path(path), text.encode("ascii"))

    def events(self) -> Iterator[Event]:
        """Yield the events of the JSON object format, in microseconds since the start."""
        leases = list(self.leases)
        names = {CONSUMER: "consumer"} | {
            n + 1: f"worker {n}" for n in sorted({lease.worker for lease in leases})
        }
        yield self._metadata(CONSUMER, "process_name", name="shardprep loader")
        for track, name in names.items():
            yield self._metadata(track, "thread_name", name=name)
            yield self._metadata(track, "thread_sort_index", sort_index=track)
        for lease in leases:
            yield from self._lease_events(lease)
        yield from self._consumer_events()
        for at, batches in list(self.ready):
            event = _track_ids(CONSUMER) | {"ph": "C", "ts": self._ns(at) / 1e3}
            yield event | {"name": "ready batches", "args": {"batches": batches}}

    def _metadata(self, track: int, kind: str, **args: object) -> Event:
        return _track_ids(track) | {"ph": "M", "name": kind, "args": args}

    def _lease_events(self, lease: LeaseSpan) -> Iterator[Event]:
        """Yield the lease's event and, inside it, an event per stage that covers all its rows."""
        track, began, ended = lease.worker + 1, self._ns(lease.began), self._ns(lease.ended)
        args = {"run": lease.run, "batch": lease.batch, "first": lease.first, "rows": lease.rows}
        yield self._span(track, "lease", f"batch {lease.batch}", began, ended, args)
        parts = [round(seconds * 1e9) for seconds in lease.stages]
        room = ended - began
        if sum(parts) > room:  # rows of neighbouring leases were counted with it
            parts = [part * room // sum(parts) for part in parts]
        for name, part in zip((*self.stages, "transport"), (*parts, room - sum(parts)), strict=True):
            if part:
                yield self._span(track, "stage", name, began, began + part, {"batch": lease.batch})
            began += part

    def _consumer_events(self) -> Iterator[Event]:
        """Yield the events of waiting, hand-over and step; there is no step between two epochs."""
        receptions, pauses = list(self.receptions), list(self.pauses)
        for reception in receptions:
            args = {"run": reception.run, "batch": reception.batch, "rows": reception.rows}
            began, got, ended = map(self._ns, (reception.began, reception.got, reception.ended))
            yield self._span(CONSUMER, "consumer", "waiting", began, got, args)
            yield self._span(CONSUMER, "consumer", "hand-over", got, ended, args)
        for last, following in pairwise(receptions):
            paused = bisect(pauses, last.ended) < bisect(pauses, following.began)
            if last.run == following.run and not paused:
                args = {"run": last.run, "batch": last.batch, "rows": last.rows}
                ended, began = self._ns(last.ended), self._ns(following.began)
                yield self._span(CONSUMER, "consumer", "step", ended, began, args)

    def _span(self, track: int, kind: str, name: str, began: int, ended: int, args: Event) -> Event:
        times = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
        return _track_ids(track) | {"ph": "X", "name": name, "cat": kind, "args": args} | times

    def _ns(self, seconds: float) -> int:
        """Nanoseconds since the start, as an integer so that rounding preserves the nesting of events."""
        return max(0, round((seconds - self.began) * 1e9))
