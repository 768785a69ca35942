"""A trace in the format of Chrome's tracing, which Perfetto opens: one track per worker, one of the consumer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from .trace import LeaseSpan, Trace

CONSUMER = 0  # its track; the workers' follow
Event = dict[str, Any]


def chrome_json(trace: Trace) -> str:
    """The JSON object format: events in the order of time, of one process, in microseconds since the start."""
    events = sorted(_Track(trace).events(), key=lambda event: (event.get("ts", -1), -event.get("dur", 0)))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


class _Track:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._pid = os.getpid()

    def events(self) -> Iterator[Event]:
        yield from self._names()
        for lease in list(self._trace.leases):
            yield from self._lease(lease)
        yield from self._consumer()
        for ready in list(self._trace.ready):
            at = self._place(CONSUMER) | {"ph": "C", "ts": self._ns(ready.at) / 1e3}
            yield at | {"name": "ready batches", "args": {"batches": ready.batches}}

    def _names(self) -> Iterator[Event]:
        workers = sorted({lease.worker for lease in self._trace.leases})
        names = {CONSUMER: "consumer"} | {worker + 1: f"worker {worker}" for worker in workers}
        yield self._metadata(CONSUMER, "process_name", name="shardprep loader")
        for track, name in names.items():
            yield self._metadata(track, "thread_name", name=name)
            yield self._metadata(track, "thread_sort_index", sort_index=track)

    def _metadata(self, track: int, kind: str, **args: object) -> Event:
        return self._place(track) | {"ph": "M", "name": kind, "args": args}

    def _place(self, track: int) -> Event:
        return {"pid": self._pid, "tid": track}

    def _lease(self, lease: LeaseSpan) -> Iterator[Event]:
        """The lease and, inside it, one after the other, what its rows spent in each stage together."""
        track, began, ended = lease.worker + 1, self._ns(lease.began), self._ns(lease.ended)
        args = {"run": lease.run, "batch": lease.batch, "first": lease.first, "rows": lease.rows}
        yield self._span(track, "lease", f"batch {lease.batch}", began, ended, args)
        parts = [round(seconds * 1e9) for seconds in lease.stages]
        room = ended - began
        if sum(parts) > room:  # rows of the lease before it, or after it, were counted with it
            parts = [part * room // sum(parts) for part in parts]
        for name, part in zip((*self._trace.stages, "transport"), (*parts, room - sum(parts)), strict=True):
            if part:
                yield self._span(track, "stage", name, began, began + part, {"batch": lease.batch})
            began += part

    def _consumer(self) -> Iterator[Event]:
        """Waiting, hand-over, step; between two runs there is no step."""
        receptions = list(self._trace.receptions)
        for reception in receptions:
            args = {"run": reception.run, "batch": reception.batch, "rows": reception.rows}
            began, got, ended = map(self._ns, (reception.began, reception.got, reception.ended))
            yield self._span(CONSUMER, "consumer", "waiting", began, got, args)
            yield self._span(CONSUMER, "consumer", "hand-over", got, ended, args)
        for last, following in pairwise(receptions):
            if last.run == following.run:
                args = {"run": last.run, "batch": last.batch, "rows": last.rows}
                ended, began = self._ns(last.ended), self._ns(following.began)
                yield self._span(CONSUMER, "consumer", "step", ended, began, args)

    def _span(self, track: int, kind: str, name: str, began: int, ended: int, args: Event) -> Event:
        times = {"ts": began / 1e3, "dur": (ended - began) / 1e3}
        return self._place(track) | {"ph": "X", "name": name, "cat": kind, "args": args} | times

    def _ns(self, seconds: float) -> int:
        """Whole nanoseconds, so that what nests still does when it is rounded; nothing is before the start."""
        return max(0, round((seconds - self._trace.began) * 1e9))
