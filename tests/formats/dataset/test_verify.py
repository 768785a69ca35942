"""Verification finds every kind of damage, names it, and never crashes on it."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import (
    CorruptRecord,
    Finding,
    ManifestDamaged,
    ShardDamaged,
    UnknownVersion,
    open_dataset,
    verify,
    write_dataset,
)
from shardprep.formats.runtime.json_record import canonical_json, sha256_of
from support.datasets import converted, flip, is_root, prep, writable
from support.image_files import encoded, pixels
from support.sampling import torture_except

CONTAINERS = ["lmdb", "hdf5"]


@pytest.fixture(scope="session", params=torture_except(CONTAINERS, "lmdb"))
def intact(request: pytest.FixtureRequest, archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few shards, because each is read in a separate process."""
    output = tmp_path_factory.mktemp("intact") / request.param
    converted(archives, output, container=request.param, shard_size=250_000)
    return output


def shards(dataset: Path) -> list[Path]:
    return sorted(dataset.glob("shard-*"))


def findings(dataset: Path, level: str = "full") -> list[Finding]:
    return verify(dataset, level=level).findings


@pytest.mark.slow
@pytest.mark.parametrize("level", torture_except(["quick", "full", "records", "decode"], "quick", "decode"))
def test_an_intact_dataset_has_no_findings(intact: Path, level: str) -> None:
    report = verify(intact, level=level)

    assert (report.findings, report.unchecked, report.exit_code) == ([], [], 0)


def test_any_flipped_byte_of_any_file_is_found(dataset: Path) -> None:
    rng = random.Random(0)
    files = [*shards(dataset), dataset / "index.npy", dataset / "boxes.npy"]
    for _ in range(60):
        file = rng.choice(files)
        position, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, position, bit)

        found = findings(dataset)

        assert [f.file for f in found] == [file.name]
        flip(file, position, bit)
    assert findings(dataset) == []


@pytest.mark.slow
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_bit_that_no_record_has_is_found_by_its_hash_at_each_level(container: str, tmp_path: Path) -> None:
    items = [{"image": encoded(pixels(9, 9, 3)), "text": "word " * n} for n in range(6)]
    write_dataset(items, tmp_path, container=container, workers=0)
    files = [*shards(tmp_path), *tmp_path.glob("column-text-*")]
    for file in files:
        flip(file, file.read_bytes().rindex(bytes(16)) + 8)

    for level in ("full", "records", "decode"):
        found = findings(tmp_path, level)
        for file in files:
            assert Finding(file.name, "its SHA-256 differs from the manifest") in found


@pytest.mark.slow
def test_records_level_names_the_damaged_record(dataset: Path) -> None:
    with open_dataset(dataset) as ds:
        victim = ds[2]
        shard = shards(dataset)[int(ds.index["shard"][2])]
    at = shard.read_bytes().index(bytes(victim.image[-200:-100]))
    flip(shard, at)

    named = [f for f in findings(dataset, "records") if f.key == victim.key]

    assert [f.file for f in named] == [shard.name]


def test_reading_a_damaged_record_raises_and_the_others_still_read(dataset: Path) -> None:
    with open_dataset(dataset) as ds:
        victim = ds[1]
        shard = shards(dataset)[int(ds.index["shard"][1])]
    flip(shard, shard.read_bytes().index(bytes(victim.image[-200:-100])))

    with open_dataset(dataset) as ds:
        with pytest.raises(CorruptRecord) as caught:
            ds[1]
        assert caught.value.key == victim.key
        assert caught.value.shard == shard.name
        assert ds[0].image


@pytest.mark.parametrize("change", [-1, -5000, 1, 5000])
def test_a_shard_of_another_size_is_found_without_opening_it(dataset: Path, change: int) -> None:
    victim = writable(shards(dataset)[1])
    os.truncate(victim, victim.stat().st_size + change)

    assert [f.file for f in findings(dataset, "quick")] == [victim.name]
    with open_dataset(dataset) as ds, pytest.raises(ShardDamaged):
        ds.shard(1)


@pytest.mark.slow
def test_swapped_shards_are_found(dataset: Path) -> None:
    first, second = shards(dataset)[:2]
    first.rename(dataset / "kept")
    second.rename(first)
    (dataset / "kept").rename(second)

    assert {f.file for f in findings(dataset)} == {first.name, second.name}
    assert {f.file for f in findings(dataset, "records")} >= {first.name, second.name}


def test_a_shard_of_another_dataset_is_found(dataset: Path, archives: Path, tmp_path: Path) -> None:
    container = shards(dataset)[0].suffix
    kind = "lmdb" if container == ".lmdb" else "hdf5"
    converted(archives, tmp_path / "other", container=kind, shard_size=250_000, seed=9)
    victim = shards(dataset)[0]
    victim.unlink()
    shutil.copy(tmp_path / "other" / victim.name, victim)

    assert victim.name in {f.file for f in findings(dataset)}


@pytest.mark.parametrize("name", ["shard", "index.npy", "boxes.npy"])
def test_a_missing_file_is_found(dataset: Path, name: str) -> None:
    victim = shards(dataset)[2] if name == "shard" else dataset / name
    victim.unlink()

    assert findings(dataset, "quick") == [Finding(victim.name, "is missing")]


@pytest.mark.parametrize("kind", ["file", "folder", "link", "fifo"])
def test_what_does_not_belong_is_found(dataset: Path, kind: str) -> None:
    stranger = dataset / "shard-99999.lmdb"
    {
        "file": lambda: stranger.write_bytes(b""),
        "folder": stranger.mkdir,
        "link": lambda: stranger.symlink_to(shards(dataset)[0]),
        "fifo": lambda: os.mkfifo(stranger),
    }[kind]()

    assert [f.file for f in findings(dataset, "quick")] == [stranger.name]


@pytest.mark.parametrize("kind", ["folder", "link", "fifo"])
def test_something_else_in_a_shards_place_is_found(dataset: Path, kind: str) -> None:
    victim = shards(dataset)[0]
    victim.rename(dataset.parent / victim.name)
    {
        "folder": victim.mkdir,
        "link": lambda: victim.symlink_to(dataset.parent / victim.name),
        "fifo": lambda: os.mkfifo(victim),
    }[kind]()

    assert findings(dataset) == [Finding(victim.name, "is not a regular file")]


def test_every_finding_is_reported_not_the_first(dataset: Path) -> None:
    first, second, third = shards(dataset)[:3]
    flip(first, 3000)
    second.unlink()
    writable(third).write_bytes(b"")
    (dataset / "notes.txt").write_text("")

    assert {f.file for f in findings(dataset)} == {first.name, second.name, third.name, "notes.txt"}


@pytest.mark.torture
def test_damaged_containers_never_crash_verify(dataset: Path) -> None:
    rng = random.Random(1)
    sizes = {shard: shard.stat().st_size for shard in shards(dataset)}
    for shard, size in sizes.items():
        with writable(shard).open("r+b") as file:
            for _ in range(40):
                file.seek(
                    rng.choice([rng.randrange(min(size, 9000)), rng.randrange(max(0, size - 9000), size)])
                )
                file.write(rng.randbytes(3))

    report = verify(dataset, level="decode")

    assert {f.file for f in report.findings} == {s.name for s in sizes}
    assert report.exit_code == 1


@pytest.mark.slow
def test_a_container_that_ends_too_early_under_its_right_root_is_reported(
    archives: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "dataset"
    converted(archives, dataset, shard_size=250_000)
    victim = writable(shards(dataset)[0])
    data = bytearray(victim.read_bytes())
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    manifest["shards"][0]["size"] = len(data) // 2 // 4096 * 4096
    reseal(dataset, manifest)
    os.truncate(victim, manifest["shards"][0]["size"])

    report = verify(dataset, level="records")

    assert any("ends before page" in f.problem for f in report.findings if f.file == victim.name)


def reseal(dataset: Path, manifest: dict[str, object]) -> None:
    """Publish a changed manifest under its right root, as an attacker or a later release could."""
    manifest.pop("root", None)
    manifest["root"] = sha256_of(manifest)
    writable(dataset / "manifest.json").write_bytes(canonical_json(manifest))


@pytest.mark.slow
def test_an_unknown_version_is_no_guess(dataset: Path) -> None:
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    reseal(dataset, manifest | {"version": [2, 0]})

    with pytest.raises(UnknownVersion):
        verify(dataset)
    assert prep("verify", dataset).returncode == 4


def test_without_a_manifest_a_dataset_is_incomplete(dataset: Path) -> None:
    (dataset / "manifest.json").unlink()

    assert verify(dataset).exit_code == 1
    with pytest.raises(ManifestDamaged):
        open_dataset(dataset)


@pytest.mark.slow
def test_a_wrong_content_root_is_found_at_records_level(dataset: Path) -> None:
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    reseal(dataset, manifest | {"content_root": "blake3:" + "0" * 64})

    assert findings(dataset) == []
    assert [f.file for f in findings(dataset, "records")] == ["manifest.json"]


@pytest.mark.slow
def test_an_index_that_lies_is_found_at_records_level(dataset: Path) -> None:
    index = np.load(dataset / "index.npy")
    index["label"][0] += 1
    with writable(dataset / "index.npy").open("wb") as file:
        np.save(file, index)
    manifest = json.loads((dataset / "manifest.json").read_bytes())
    from shardprep.formats.runtime.files import hash_file

    entry = next(t for t in manifest["tables"] if t["name"] == "index.npy")
    entry |= {"sha256": hash_file(dataset / "index.npy"), "size": (dataset / "index.npy").stat().st_size}
    reseal(dataset, manifest)

    assert findings(dataset) == []
    assert [f.key for f in findings(dataset, "records")] == [index["key"][0].decode()]


def test_what_cannot_be_read_is_not_called_damaged(dataset: Path) -> None:
    if is_root():
        pytest.skip("root reads everything; test_faults injects the error instead")
    shards(dataset)[0].chmod(0)

    report = verify(dataset)

    assert report.exit_code == 3
    assert report.findings == []


def test_leftovers_of_a_killed_conversion_do_not_matter_once_the_manifest_is_there(dataset: Path) -> None:
    (dataset / ".prep").mkdir()
    (dataset / ".prep" / "board").write_bytes(bytes(8))

    assert findings(dataset) == []


@pytest.mark.slow
def test_the_report_for_machines_names_everything(dataset: Path) -> None:
    flip(shards(dataset)[0], 4000)

    done = prep("verify", dataset, "--json")

    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert done.stderr == ""
    assert report["ok"] is False
    assert [f["file"] for f in report["findings"]] == [shards(dataset)[0].name]
