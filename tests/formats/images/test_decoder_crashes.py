"""An image that crashes the decoder is a bad image: it is named, and can be left out."""

import json
from pathlib import Path

import pytest

from shardprep.formats import Finding, WorkerDied, verify
from shardprep.loaders import Loader, TrainTransform
from support import crashing_decoder
from support.crashing_decoder import write_images
from support.datasets import converted, tree

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
    assert {entry["key"]: entry["reason"] for entry in quarantine} == {
        f"class{at % 2}/{at:03}.jpg": REASON for at in (3, 4, 10)
    }


@pytest.mark.torture
def test_verify_names_the_images_and_checks_the_others(tmp_path: Path) -> None:
    source = write_images(tmp_path / "source", 10, 2, 9)
    converted(source, tmp_path / "out")  # without a decode check

    report = verify(tmp_path / "out", level="decode", workers=1)

    assert sorted(report.findings, key=str) == [
        Finding("shard-00000.lmdb", REASON, f"class{key}.jpg") for key in ("0/002", "1/009")
    ]
    assert report.exit_code == 1
    assert verify(tmp_path / "out", level="records").findings == []


@pytest.fixture
def crashing_dataset(tmp_path: Path) -> Path:
    source = write_images(tmp_path / "source", 12, 2, 9)
    converted(source, tmp_path / "out", order="key")
    return tmp_path / "out"


CRASHING = {f"class{key}.jpg": "its decoding crashed by SIGSEGV" for key in ("0/002", "1/009")}


@pytest.mark.torture
def test_a_loader_that_skips_bad_records_skips_them(crashing_dataset: Path) -> None:
    with Loader(
        crashing_dataset,
        batch_size=4,
        transform=TrainTransform(8),
        workers=2,
        on_bad_record="skip",
        with_numbers=True,
    ) as loader:
        batches = list(loader)
        receipt = loader.receipt()

        assert loader.skipped == CRASHING
        numbers = [number for _, _, numbers in batches for number in numbers.tolist()]
        assert {loader.key(number) for number in set(range(12)) - set(numbers)} == CRASHING.keys()
    assert [len(images) for images, _, _ in batches] == [3, 4, 3]
    assert all(len(images) == len(labels) for images, labels, _ in batches)
    assert (receipt.count, len(receipt.skipped)) == (10, 2)


@pytest.mark.slow
def test_a_loader_that_raises_names_the_record_and_what_happened(crashing_dataset: Path) -> None:
    with (
        Loader(crashing_dataset, batch_size=4, transform=TrainTransform(8), workers=2) as loader,
        pytest.raises(WorkerDied, match="its decoding crashed by SIGSEGV") as caught,
    ):
        list(loader)

    assert caught.value.key == "class0/002.jpg"
