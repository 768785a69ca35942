"""The check of this machine's decoder by canaries, and the warnings where it makes other pixels."""

import json
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import DecoderDiffers
from shardprep.formats.images import decode as canaries
from shardprep.formats.images.decode import check_decoder, cv2
from shardprep.formats.reports.gate import gate
from shardprep.loaders import Loader, TrainTransform
from support.datasets import prep_here

SMALL: dict[str, Any] = {"batch_size": 8, "workers": 0, "transform": TrainTransform(8)}


@pytest.fixture(autouse=True)
def forget_checks() -> Iterator[None]:
    yield
    canaries.check_decoder.cache_clear()
    canaries.warn_of_decoder.cache_clear()


@pytest.fixture
def other_decoder(monkeypatch: pytest.MonkeyPatch, forget_checks: None) -> None:
    """TensorFlow's decoder with its fast inverse DCT, in the place of OpenCV's for JPEGs in colour."""
    tf = pytest.importorskip("tensorflow")
    own = canaries.decode

    def decoded(image: bytes, flags: int) -> Any:
        if image[:2] != b"\xff\xd8" or flags != cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION:
            return own(image, flags)
        return tf.io.decode_jpeg(image, channels=3, dct_method="INTEGER_FAST").numpy()[..., ::-1]

    monkeypatch.setattr(canaries, "decode", decoded)
    canaries.check_decoder.cache_clear()
    canaries.warn_of_decoder.cache_clear()


@pytest.fixture
def other_resizing(monkeypatch: pytest.MonkeyPatch, forget_checks: None) -> None:
    """Another arithmetic of resizing, as OpenCV has it for ARM."""
    exact = partial(cv2.resize, interpolation=cv2.INTER_LINEAR_EXACT)
    monkeypatch.setattr(cv2, "resize", lambda pixels, size, **_: exact(pixels, size))
    canaries.check_decoder.cache_clear()
    canaries.warn_of_decoder.cache_clear()


@pytest.mark.usefixtures("other_decoder")
def test_a_loader_warns_once_of_a_decoder_with_other_pixels(lmdb_shards: Path) -> None:
    with pytest.warns(
        DecoderDiffers, match=r"OpenCV .* decodes some images \(jpeg-420.jpg, .*reference"
    ) as told:
        Loader(lmdb_shards, **SMALL).close()
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loader(lmdb_shards, **SMALL).close()
        Loader(lmdb_shards, **(SMALL | {"transform": None})).close()


def test_a_state_from_a_machine_with_another_decoder_warns(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, **SMALL) as loader:
        next(iter(loader))
        state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        assert state["card"]["versions"]["decoder"] == check_decoder().digest
        state["card"]["versions"]["decoder"] = "0" * 16
        with pytest.warns(DecoderDiffers, match="than this run's previous decoder") as told:
            loader.load_state_dict(state)
        assert told[0].filename == __file__
        for older in ({}, {"versions": {}}, {"versions": {"decoder": 7}}, None):
            loader.load_state_dict(state | {"card": older})


@pytest.mark.parametrize(
    ("other", "canary"), [("other_decoder", "jpeg-420.jpg"), ("other_resizing", "resized jpeg-420.jpg")]
)
def test_only_other_pixels_change_the_identity_of_a_loader_and_fail_the_gate(
    lmdb_shards: Path, request: pytest.FixtureRequest, other: str, canary: str
) -> None:
    found, done = check_decoder(), prep_here("gate", lmdb_shards, "--canaries", "--json")
    checks = json.loads(done.stdout)["checks"]

    assert (found.digest, found.differing) == (found.reference, ())
    assert [(check["name"], check["passed"]) for check in checks] == [("canaries", True), ("damaged", True)]
    with Loader(lmdb_shards, **SMALL) as loader:
        assert loader.identity["OpenCV"] == cv2.__version__
        request.getfixturevalue(other)
        assert loader.identity["OpenCV"].startswith(f"{cv2.__version__}, with the pixels ")
    if other == "other_resizing":  # on ARM, a warning from each loader would help nobody
        Loader(lmdb_shards, **SMALL).close()
    failed = gate(lmdb_shards, {}, canaries=True)
    assert not failed.passed
    assert failed.checks[0].records[0] == canary
    assert failed.checks[0].found != failed.checks[0].limit
