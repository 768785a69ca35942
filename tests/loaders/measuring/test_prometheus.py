"""The metrics that Prometheus reads."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry, generate_latest

from shardprep.formats import UsageError
from shardprep.loaders import FakeData, Flow, Loader, TrainTransform
from shardprep.loaders.prometheus import StatsCollector


def test_every_kind_of_source_is_read_whenever_prometheus_asks(lmdb_shards: Path) -> None:
    flow = Flow.from_iterable(list(range(40))).batch(8)
    fake = FakeData(4, batch_size=8, size=(16, 16))
    registry = CollectorRegistry()
    with Loader(lmdb_shards, batch_size=16, transform=TrainTransform(32), workers=1) as loader:
        registry.register(StatsCollector(train=loader, flow=flow, fake=fake))
        nothing = generate_latest(registry).decode()
        batches = sum(1 for source in (loader, flow, fake) for _ in source)
        text = generate_latest(registry).decode()

    assert 'shardprep_rows_total{source="train"} 0.0' in nothing
    assert f'shardprep_rows_total{{source="train"}} {(batches - 5 - 4) * 16}.0' in text
    assert 'shardprep_rows_total{source="flow"} 40.0' in text
    assert 'shardprep_stage_busy_ratio{place="worker",source="train",stage="decode"}' in text
    assert 'shardprep_limit{source="flow",stage="' in text
    assert "shardprep_starved_seconds_total" in text


def test_a_source_without_stages_is_refused_with_advice() -> None:
    for source in SimpleNamespace(stats=object), []:
        with pytest.raises(UsageError, match=f"{type(source).__name__} has no stages; give the source"):
            StatsCollector(train=source)  # type: ignore[arg-type]
