"""Counts and times of a flow's passes, and what limits them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from shardprep.formats.processes.worker_pool import usable_cpus
from shardprep.loaders.flow.core.meter import GroupTimes, NodePlace, PassMeter
from shardprep.loaders.loader.bottleneck import (
    MAX_WAITING_SHARE,
    STEP,
    PipelineTimes,
    StageLoad,
    Verdict,
    loads_to_list,
    rate_of,
)
from shardprep.loaders.loader.shown_stats import ShownStats

HAND_OVER = "hand-over"
STEP_ADVICE = "your step is slower than the data; there is nothing to gain in the flow"
HAND_OVER_ADVICE = "the steps between items take the time; make batches larger, or add prefetch()"
MAIN_ADVICE = (
    "it runs in the thread that draws, and your step waits meanwhile; give a map threads= or processes=, or add "
    "prefetch()"
)
POOL_ADVICE = "more threads help where the function waits or releases the interpreter's lock, else processes="
THREAD_ADVICE = "the steps before prefetch() share its one thread; give a map threads= or processes="
PROCESS_ADVICE = "the steps before in_process() share its one process; a map with processes= uses several"

MAIN: NodePlace = (), -1
COUNTS = ("passes", "items", "rows", "timed", "elapsed", "warming", "drawing")


@dataclass(frozen=True)
class FlowStats(ShownStats):
    """Counts and seconds of a flow's passes since it was made, or since other stats of it (:meth:`since`).

    ``items`` were delivered in ``passes`` passes; ``rows`` are those of batches, where the flow makes batches
    (``has_rows``), else items. ``timed`` of the rows were not in a pass's first item. ``elapsed`` is the
    seconds of all passes, each from its first item on; ``drawing`` the part in which the consumer's thread
    was within the flow, ``warming`` the seconds before first items. ``groups`` are the seconds of the stages,
    by the thread, the threads or the processes that run them. ``cpus`` is the number of CPUs that this
    process may use.
    """

    kind: ClassVar[str] = "flow"

    has_rows: bool
    passes: int = 0
    items: int = 0
    rows: int = 0
    timed: int = 0
    elapsed: float = 0.0
    warming: float = 0.0
    drawing: float = 0.0
    groups: dict[NodePlace, GroupTimes] = field(default_factory=dict)
    cpus: int = field(default_factory=usable_cpus)

    @classmethod
    def of(cls, meter: PassMeter, *, has_rows: bool) -> Self:
        """Return what one pass has counted."""
        counts = {name: getattr(meter, name) for name in COUNTS[1:]}
        main = meter.main.read() if meter.items else GroupTimes("main", "main")
        groups = {MAIN: main} | {at: group.read() for at, group in list(meter.groups.items())}
        return cls(has_rows, passes=1, groups=groups, **counts)

    def plus(self, other: Self) -> Self:
        """Return the sum of both, which are of different passes."""
        groups = dict(self.groups)
        for at, group in other.groups.items():
            groups[at] = groups[at].plus(group) if at in groups else group
        return replace(
            self, groups=groups, **{name: getattr(self, name) + getattr(other, name) for name in COUNTS}
        )

    def since(self, before: Self) -> Self:
        """Return what was counted after ``before``, earlier stats of the same flow."""
        groups = {
            at: group.less(before.groups[at]) if at in before.groups else group
            for at, group in self.groups.items()
        }
        return replace(
            self, groups=groups, **{name: getattr(self, name) - getattr(before, name) for name in COUNTS}
        )

    @property
    def unit(self) -> str:
        """The word for what rates count: "rows" or "items"."""
        return "rows" if self.has_rows else "items"

    @property
    def loads(self) -> tuple[StageLoad, ...]:
        """Each stage's seconds per row or item, utilisation and waiting; the last is the consumer's own work.

        Empty before a second item.
        """
        if not self._is_known:
            return ()
        beside = [load for _, loads in self._beside() for load in loads]
        return (*beside, *self._own(), self._step())

    @property
    def verdict(self) -> Verdict | None:
        """The stage that limits; None before a second item."""
        if not self._is_known:
            return None
        own, beside, step = self._own(), self._beside(), self._step()
        rate = self.timed / self.elapsed
        if self.drawing <= MAX_WAITING_SHARE * self.elapsed or not (beside or own):
            return self._verdict(step, rate, STEP_ADVICE, [own, *(loads for _, loads in beside)])
        if beside and self.groups[MAIN].starved >= self.drawing / 2:
            group, loads = max(beside, key=lambda found: _seconds(found[1]))
            slowest = max(loads, key=_seconds_of)
            others = [other for _, other in beside if other is not loads]
            return self._verdict(slowest, rate, self._advice(group, slowest, rate), [(*own, step), *others])
        busiest = max(own, key=_seconds_of)
        rest = (*(load for load in own if load is not busiest), step)
        advice = HAND_OVER_ADVICE if busiest.name == HAND_OVER else MAIN_ADVICE
        return self._verdict(busiest, rate, advice, [rest, *(loads for _, loads in beside)])

    def _verdict(
        self, limit: StageLoad, rate: float, advice: str, others: Iterable[tuple[StageLoad, ...]]
    ) -> Verdict:
        """Return the verdict; without the limit, the slowest of the others would limit."""
        slowest = max(filter(None, others), key=_seconds, default=())
        after = rate_of(_seconds(slowest))
        name = max(slowest, key=_seconds_of).name if slowest else STEP
        return Verdict(limit.name, rate, name, max(after, rate), advice, self.unit)

    def _advice(self, group: GroupTimes, slowest: StageLoad, rate: float) -> str:
        if group.place == "thread":
            return POOL_ADVICE if slowest.name == group.name else THREAD_ADVICE
        if group.name == "in_process()":
            return PROCESS_ADVICE
        times = PipelineTimes(
            images=self.rows,
            timed=self.timed,
            elapsed=self.elapsed,
            image_bytes=0.0,
            workers=group.width,
            cpus=self.cpus,
            filling=group.filling,
            cpu=group.cpu,
            queued=group.queued,
            stages=group.stages,
            blocked=group.blocked,
            starved=self.groups[MAIN].starved,
            handing=0.0,
            unit=self.unit,
        )
        return times.advice(slowest, rate)

    @property
    def _is_known(self) -> bool:
        return self.timed > 0 and self.elapsed > 0

    def _beside(self) -> list[tuple[GroupTimes, tuple[StageLoad, ...]]]:
        """The stages that run beside the consumer's thread, by their groups."""
        return [
            (
                group,
                tuple(self._load(group, name, seconds, self.rows) for name, seconds in group.stages.items()),
            )
            for at, group in self.groups.items()
            if at != MAIN and group.stages
        ]

    def _own(self) -> tuple[StageLoad, ...]:
        """The flow's stages in the consumer's thread."""
        main = self.groups[MAIN]
        rest = max(0.0, self.drawing - main.starved - sum(main.stages.values()))
        parts = main.stages | {HAND_OVER: rest}
        return tuple(self._load(main, name, seconds, self.timed) for name, seconds in parts.items())

    def _step(self) -> StageLoad:
        return self._load(self.groups[MAIN], STEP, max(0.0, self.elapsed - self.drawing), self.timed)

    def _load(self, group: GroupTimes, name: str, seconds: float, rows: int) -> StageLoad:
        each = seconds / rows
        return StageLoad(
            name,
            group.place,
            seconds=each,
            utilisation=min(1.0, seconds / group.width / self.elapsed),
            starved=min(1.0, group.starved / self.elapsed),
            blocked=min(1.0, group.blocked / self.elapsed),
            limit=rate_of(each / group.width),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the counts, ``groups``, ``loads`` and ``verdict``."""
        verdict = self.verdict
        return {
            **{f.name: getattr(self, f.name) for f in fields(self)},
            "groups": list(map(asdict, self.groups.values())),
            "loads": loads_to_list(self.loads),
            "verdict": verdict.to_dict() if verdict else None,
        }

    def __repr__(self) -> str:
        limit = f"; {self.verdict.limit} limits" if self.verdict else ""
        return f"<FlowStats: {self.rows:,} {self.unit} in {self.passes:,} passes{limit}>"

    def __str__(self) -> str:
        return str(self.verdict or "nothing is known before a pass's second item; make batches smaller")


def _seconds(loads: Iterable[StageLoad]) -> float:
    """The seconds in which the loads' group makes one row."""
    return sum(map(_seconds_of, loads))


def _seconds_of(load: StageLoad) -> float:
    return 1 / load.limit if math.isfinite(load.limit) else 0.0
