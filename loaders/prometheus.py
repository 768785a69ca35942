"""Stats of loaders, flows and inputs as metrics of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from shardprep.formats.errors import MissingExtra, UsageError
from shardprep.loaders.loader.stats import PipelineStats

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra.of("shardprep.loaders.prometheus", "prometheus-client", "prometheus") from error

__all__ = ["StatsCollector"]

COUNTERS = {
    "rows": "Records delivered.",
    "batches": "Batches delivered.",
    "items": "Items delivered.",
    "elapsed_seconds": "Seconds since the first batch, while iterating.",
    "starved_seconds": "Seconds in which the training step waited for a batch.",
    "blocked_seconds": "Seconds in which workers waited for a free slot.",
    "copied": "Batches copied because too many were held.",
    "restarts": "Workers replaced.",
}
"""The counts of any source, with their unit and help; a source has those that its stats have."""

STAGES = {
    "utilisation": ("stage_busy_ratio", "Share of time in which the processes or threads of a stage work."),
    "seconds": ("stage_seconds_per_record", "Seconds a stage takes for one record."),
    "limit": ("stage_records_per_second", "Records per second that a stage alone could make."),
}


class Source(Protocol):
    """A Loader, a Flow or an input of TensorFlow."""

    def stats(self) -> PipelineStats: ...


class StatsCollector(Collector):
    """Collector for a registry of ``prometheus_client``; reads the stats whenever Prometheus asks.

    Thread-safe. Metrics are named ``shardprep_…``, with the label ``source``, and ``stage`` and ``place`` for
    those of a stage. Reading takes some microseconds, and a source that is closed shows its last counts.

    Args:
        sources: Loaders, flows and inputs of TensorFlow, by the names for the label ``source``; for a
            RemoteSource give what its senders serve. One collector takes all.

    Raises:
        UsageError: A source has no stages.
    """

    def __init__(self, **sources: Source) -> None:
        for name, source in sources.items():
            if not hasattr(source, "stats") or "loads" not in getattr(source.stats(), "to_dict", dict)():
                raise UsageError(
                    f"{name}: {type(source).__name__} has no stages; give the source it draws from"
                )
        self._sources: Mapping[str, Source] = dict(sources)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all sources."""
        all_stats = {name: source.stats().to_dict() for name, source in self._sources.items()}
        for metric, text in COUNTERS.items():
            counter = CounterMetricFamily(f"shardprep_{metric}", text, labels=["source"])
            for name, stats in all_stats.items():
                # an input's ``starved`` is a fraction, and its ``starved_seconds`` include the first wait
                field = "waited" if metric == "starved_seconds" and "waited" in stats else metric
                count = stats.get(field, stats.get(metric.removesuffix("_seconds")))
                if count is not None:
                    counter.add_metric([name], count)
            if counter.samples:
                yield counter
        for key, (metric, text) in STAGES.items():
            gauge = GaugeMetricFamily(f"shardprep_{metric}", text, labels=["source", "stage", "place"])
            for name, stats in all_stats.items():
                for stage in stats["loads"]:
                    value = float("inf") if stage[key] is None else stage[key]  # None: no limit
                    gauge.add_metric([name, stage["name"], stage["place"]], value)
            yield gauge
        limits = GaugeMetricFamily(
            "shardprep_limit", "1 for the stage that limits.", labels=["source", "stage"]
        )
        for name, stats in all_stats.items():
            if stats["verdict"]:
                limits.add_metric([name, stats["verdict"]["limit"]], 1)
        yield limits
