"""Counters of a step's worker processes during a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager

from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.protocol.batch import EngineBatch
from shardprep.loaders.engine.protocol.task import Items
from shardprep.loaders.engine.run import BatchRequest
from shardprep.loaders.engine.stats import EngineStats
from shardprep.loaders.flow.core.meter import GroupMeter, GroupTimes


class EngineMeter:
    """The times of the engines that a step uses in a pass, one after the other.

    ``stages`` has the names that the engine's stages have here; ``rest`` is that of all other time with work.
    ``consumer`` counts the seconds for which its thread waits for an engine.
    """

    def __init__(
        self,
        name: str,
        processes: int,
        *,
        stages: Mapping[str, str],
        rest: str,
        consumer: GroupMeter,
    ) -> None:
        self._names, self._rest = stages, rest
        self._consumer = consumer
        self._ended = GroupTimes(name, "worker", processes)
        self._current: tuple[Engine, EngineStats] | None = None

    @contextmanager
    def run(self, engine: Engine, plans: Iterable[Items | BatchRequest]) -> Iterator[Iterator[EngineBatch]]:
        """Run the engine, and end the run with the context."""
        waited, self._current = engine.meter.waiting, (engine, engine.stats())

        def counted(batch: EngineBatch) -> EngineBatch:
            nonlocal waited
            before, waited = waited, engine.meter.waiting
            self._consumer.count_wait(waited - before)
            return batch

        try:
            with closing(engine.run(plans)) as batches:  # type: ignore[type-var]
                yield map(counted, batches)
        finally:
            self._ended, self._current = self.read(), None

    def read(self) -> GroupTimes:
        ended, current = self._ended, self._current
        return ended if current is None else ended.plus(self._times(*current))

    def _times(self, engine: Engine, before: EngineStats) -> GroupTimes:
        stats = engine.stats().since(before)
        stages = {name: stats.stages[stage] for stage, name in self._names.items()}
        filling = sum(stats.filling)
        stages[self._rest] = max(0.0, filling - sum(stages.values()))
        return GroupTimes(
            self._ended.name,
            "worker",
            self._ended.width,
            stages,
            starved=sum(stats.waiting) / len(stats.waiting),
            blocked=stats.blocked,
            filling=filling,
            cpu=sum(stats.cpu),
            queued=sum(stats.queued),
        )
