"""An image that crashes the decoder is a bad image: it is named, and can be left out."""

import json
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import Finding, OperationError, WorkerDied, plan_conversion, report as examine, verify
from shardprep.loaders import Loader, TrainTransform
from support import crashing_decoder
from support.crashing_decoder import write_images
from support.datasets import converted, tree
from support.resealed import reseal

REASON = "crashes the decoder (SIGSEGV)"


@pytest.fixture(autouse=True)
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crashing_decoder.install(tmp_path / "site", monkeypatch)


@pytest.mark.torture
def test_convert_leaves_them_out_alike_for_any_number_of_workers(tmp_path: Path) -> None:
    source = write_images(tmp_path / "source", 12, 3, 4, 10)
    options = {"decode_check": True, "on_bad_image": "skip", "shard_size": 3000}

    manifest = converted(source, tmp_path / "here", workers=0, **options)
    converted(source, tmp_path / "there", workers=2, **options)

    assert len(manifest.shards) > 1
    assert (manifest.records, manifest.skipped) == (9, 3)
    assert tree(tmp_path / "here") == tree(tmp_path / "there")
    quarantine = json.loads((tmp_path / "here" / "quarantine.json").read_bytes())
    reasons = {f"class{at % 2}/{at:03}.jpg": REASON for at in (3, 4, 10)}
    assert {entry["key"]: entry["reason"] for entry in quarantine} == reasons


@pytest.mark.slow
def test_a_kind_that_is_always_decoded_ends_neither_a_dry_run_nor_a_conversion(tmp_path: Path) -> None:
    source = write_images(tmp_path / "source", 4, 2, suffix=".bmp")
    planned = plan_conversion(source, tmp_path / "out", workers=1)
    manifest = converted(source, tmp_path / "out", workers=0, on_bad_image="skip")
    (entry,) = json.loads((tmp_path / "out" / "quarantine.json").read_bytes())

    assert [f"{p.first.key}: {p.first.message}" for p in planned.problems] == [f"class0/002.bmp: {REASON}"]
    assert (manifest.records, entry["key"], entry["reason"]) == (3, "class0/002.bmp", REASON)


@pytest.mark.slow
def test_verify_names_an_image_of_such_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_images(tmp_path / "source", 4, 2, suffix=".bmp")
    with monkeypatch.context() as patch:
        patch.delenv("PYTHONPATH")
        converted(source, tmp_path / "out", order="key")
    rows = np.load(tmp_path / "out/index.npy")
    rows["width"][0] += 1
    np.save(tmp_path / "out/index.npy", rows)
    reseal(tmp_path / "out")
    for level in ("records", "decode"):
        other, crash = verify(tmp_path / "out", level=level, workers=1).findings  # type: ignore[arg-type]
        assert other.problem.startswith("record 0 differs from the index")
        assert crash == Finding("shard-00000.lmdb", REASON, "class0/002.bmp")


@pytest.mark.slow
def test_each_names_such_images_and_does_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    converted(write_images(tmp_path / "source", 12, 2, 9), out, order="key")  # without a decode check
    keys = ["class0/002.jpg", "class1/009.jpg"]
    options = {"batch_size": 4, "transform": TrainTransform(8), "workers": 2}

    report = verify(out, level="decode", workers=1)
    with (
        Loader(out, **options) as loader,  # type: ignore[arg-type]
        pytest.raises(WorkerDied, match="the last by SIGSEGV") as caught,
    ):
        list(loader)

    assert caught.value.key == keys[0]
    assert sorted(report.findings, key=str) == [Finding("shard-00000.lmdb", REASON, key) for key in keys]
    assert (report.exit_code, verify(out, level="records").findings) == (1, [])
    with Loader(out, on_bad_record="skip", with_numbers=True, **options) as loader:  # type: ignore[arg-type]
        batches, receipt = list(loader), loader.receipt()

        assert loader.skipped == dict.fromkeys(keys, "its workers crashed by SIGSEGV")
        numbers = [number for _, _, numbers in batches for number in numbers.tolist()]
        assert [loader.key(number) for number in sorted(set(range(12)) - set(numbers))] == keys
    assert [(len(images), len(labels)) for images, labels, _ in batches] == [(3, 3), (4, 4), (3, 3)]
    assert (receipt.count, len(receipt.skipped), receipt.is_complete) == (10, 2, False)
    monkeypatch.setenv("CRASH", "9")
    with pytest.raises(OperationError, match=r"out: shard-00000.lmdb: .*signal 9 \(out of memory\?"):
        examine(out, workers=1)
