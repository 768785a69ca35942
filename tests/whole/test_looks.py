"""What a REPL or notebook shows of public objects: one short line."""

from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import inspect, open_dataset, verify
from shardprep.loaders import FakeData, Flow, Loader
from shardprep.loaders.remote import RemoteStats, SenderReport
from support.disk_profiles import full_profile
from support.loaded import epoch_of


@pytest.fixture
def things(lmdb_shards: Path) -> dict[str, Any]:
    fake = FakeData(3, batch_size=5, size=(2, 2))
    epoch_of(fake)
    flow = Flow.from_iterable(range(20)).map(str)
    assert len(list(flow)) == 20
    options: dict[str, Any] = {"batch_size": 10, "workers": 0}
    with (
        Loader(lmdb_shards, **options) as loader,
        Loader(lmdb_shards, records=range(40), rank=1, world_size=2, **options) as part,
    ):
        epoch_of(loader)
        epoch_of(part)
        sender = SenderReport("host:1", "", 3, 1000, 1.0, 0)
        report = verify(lmdb_shards, level="quick")
        dataset = open_dataset(lmdb_shards)
        return {
            "loader": loader,
            "part": part,
            "loader stats": loader.stats(),
            "engine stats": loader.engine.stats(),
            "receipt": loader.receipt(),
            "dataset": dataset,
            "record": dataset[0],
            "manifest": dataset.manifest,
            "label space": dataset.manifest.labels,
            "summary": inspect(dataset),
            "report": report,
            "fake": fake,
            "fake stats": fake.stats(),
            "flow stats": flow.stats(),
            "flow": Flow.from_iterable(list(range(10_000))).map(str).batch(7),
            "disk profile": full_profile(),
            "remote stats": RemoteStats((sender,) * 3, (("x", "y" * 500),) * 100, 0, 3, 0, 0, 0, 0, 0.1),
        }


def test_every_one_is_a_short_line(things: dict[str, Any], lmdb_shards: Path) -> None:
    looks = {name: repr(thing).replace(str(lmdb_shards), "P") for name, thing in things.items()}

    assert {name: look for name, look in looks.items() if len(look) > 110 or "\n" in look} == {}
    assert {name: look for name, look in looks.items() if " object at " in look} == {}
    assert looks["loader"] == "<Loader 'P': 204 records in batches of 10, 0 workers, epoch 1 next>"
    assert looks["part"] == (
        "<Loader 'P': 40 of 204 records in batches of 10, rank 1 of 2, 0 workers, epoch 1 next>"
    )
    assert looks["receipt"] == "<Receipt of epoch 0: 200 delivered, 0 skipped, 4 left out>"
    assert looks["dataset"] == "<Dataset 'P': 204 records, train>"
