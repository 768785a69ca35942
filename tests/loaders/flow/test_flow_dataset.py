"""A converted dataset as a flow: its records, in the loader's order, read in any process."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import write_dataset
from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.shards.manifest import read_manifest
from shardprep.formats.storage.open import open_dataset
from shardprep.loaders import EvalTransform, Flow, GlobalShuffle, Loader, LocalShuffle
from shardprep.loaders.flow.node import PassContext
from shardprep.loaders.loader.ahead import ReadAhead
from support.sampling import torture_except
from support.waiting import until

SHUFFLES = [None, LocalShuffle(1), LocalShuffle(30), LocalShuffle("500kB"), GlobalShuffle()]


@pytest.fixture(params=["lmdb", "hdf5"])
def shards(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_shards")
    return path


def test_records_come_as_they_are_stored(shards: Path) -> None:
    flow = Flow.from_dataset(shards, with_keys=True)
    with open_dataset(shards) as dataset:
        assert list(flow) == [(record.key, record.image, record.label) for record in dataset]
        assert len(flow) == len(dataset)
    assert flow.batches_never_change
    for image, label in Flow.from_dataset(shards).take(3):
        assert (type(image), type(label)) == (bytes, int)


def test_the_columns_of_saved_items_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[Path] = set()
    monkeypatch.setattr(ReadAhead, "_request", lambda _, path, *place: asked.add(path))
    write_dataset([{"text": "a" * (1 + n)} for n in range(9)], tmp_path)
    (column,) = read_manifest(tmp_path).column_entries

    for _ in Flow.from_dataset(tmp_path).take(1):
        until(lambda: asked == {tmp_path / shard.name for shard in column.shards})


def test_a_resumed_pass_is_read_ahead_from_there(lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, (first, *others) = set[str](), read_manifest(lmdb_shards).shards
    monkeypatch.setattr(ReadAhead, "_request", lambda _, path, *place: asked.add(path.name))
    flow = Flow.from_dataset(lmdb_shards)
    flow.load_state_dict(flow.state_dict() | {"items": first.records})
    items = iter(flow)
    assert len([next(items), next(items)]) == 2
    until(lambda: asked == {shard.name for shard in others})


@pytest.mark.parametrize("shuffle", SHUFFLES, ids=str)
def test_a_pass_has_the_order_of_the_loaders_epoch(lmdb_shards: Path, shuffle: Any) -> None:
    flow = Flow.from_dataset(lmdb_shards, shuffle=shuffle, seed=7, with_keys=True)
    with Loader(
        lmdb_shards, batch_size=20, shuffle=shuffle, seed=7, workers=0, drop_last=False, with_numbers=True
    ) as loader:
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            keys = [loader.key(number) for *_, numbers in loader for number in numbers]
            assert [key for key, *_ in flow.at_pass(epoch)] == keys


def test_what_is_shuffled_and_taken_is_fetched_all_the_same(lmdb_shards: Path) -> None:
    node = Flow.from_dataset(lmdb_shards).shuffle(40, seed=3).take(50).node
    assert node.fetch

    with node.fetch() as item_of:
        fetched = [item_of(key) for key in node.keys(PassContext(2), range(50))]
    assert fetched == list(node.run(PassContext(2)))
    assert list(pickle.loads(pickle.dumps(node)).run(PassContext(2))) == fetched  # noqa: S301
    with pytest.raises(IndexError, match="item 50 of 50"):
        list(node.keys(PassContext(), [50]))


def test_a_damaged_dataset_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ManifestDamaged):
        Flow.from_dataset(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    torture_except([{}, {"threads": 2}, {"processes": 2}], {}, {"threads": 2}),
    ids=["here", "threads", "processes"],
)
def test_a_transformed_dataset_is_what_the_loader_delivers(lmdb_shards: Path, options: Any) -> None:
    transform = EvalTransform(32)
    with (
        Flow.from_dataset(lmdb_shards).transform(transform, **options).batch(20) as flow,
        Loader(lmdb_shards, batch_size=20, transform=transform, workers=0, drop_last=False) as loader,
    ):
        np.testing.assert_equal(list(flow), list(loader))


def test_a_transform_s_outputs_of_any_size_go_with_their_labels() -> None:
    def halves(record: Any, rng: np.random.Generator) -> tuple[Any, Any]:
        return record.image[: len(record.image) // 2], rng.random()

    items = list(Flow.from_iterable([(b"abcd", 7), (b"ef", 8)]).transform(halves))

    assert [(image, label) for image, _, label in items] == [(b"ab", 7), (b"e", 8)]
