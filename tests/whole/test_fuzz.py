"""Odd files of every kind are read, or refused with a documented error; no crash, hang or flood of memory."""

import os
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest
from test_boxes import WNID, box_object, xml
from test_png import TWO

from shardprep.formats import collect
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.loaders import Loader, TrainTransform
from support import fuzz_targets
from support.column_datasets import write_columns
from support.datasets import converted
from support.fuzz_targets import MANY, TARGETS
from support.image_files import chunk, cmyk_jpeg, encoded, pixels, png, tiff, with_exif
from support.image_kinds import KINDS
from support.record_sources import official, tfds, write_tfrecord
from support.repository import SUPPORT
from support.source_builders import Miniature
from support.source_members import CONTENT, MEMBERS
from support.tensorpack_files import SERIALIZERS, key_of, save

MINI = Miniature()


@pytest.fixture(scope="module")
def base(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Honest files of every kind."""
    folder = tmp_path_factory.mktemp("fuzz") / "base"
    MINI.write_kaggle(folder / "kaggle")
    MINI.write_caffe(folder / "kaggle")
    images = {
        "still.png": encoded(pixels(12, 17, 3), ".png"),
        "animated.png": TWO,
        "palette.png": png(9, 6, 3, chunk(b"PLTE", bytes(6)), chunk(b"tRNS", bytes(2))),
        "baseline.jpg": encoded(pixels(12, 17, 3)),
        "progressive.jpg": encoded(pixels(12, 17, 3), ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1),
        "exif.jpg": with_exif(encoded(pixels(6, 9, 3)), tiff("<", (0x010F, 2, 7), (0x0112, 3, 6))),
        "cmyk.jpg": cmyk_jpeg(),
        "line.jpg": encoded(pixels(1, 300, 3)),
    }
    others = {
        "meta.mat": MINI.meta(),
        "plain.mat": MINI.meta()[:128] + zlib.decompress(MINI.meta()[136:]),
        "truth.txt": "".join(f"{number}\n" for number in MINI.truth).encode(),
        "box.xml": b'<?xml version="1.0" encoding="utf-8"?>'
        + xml(box_object(WNID, 1, 2, 30, 40), box_object("dog", -5, 2, 130, 20)),
    }
    for name, data in (images | others).items():
        (folder / name).write_bytes(data)
    (folder / "kinds").mkdir()
    for name, (data, _) in KINDS.items():
        (folder / "kinds" / name).write_bytes(data)
    for name, serializer in (("pickle", "pickle 5"), ("text", "pickle 2"), ("msgpack", "msgpack")):
        dumps = SERIALIZERS[serializer]
        points = [*images.values(), np.frombuffer(images["baseline.jpg"], np.uint8)]
        records = {key_of(at): dumps([image, np.int64(at)]) for at, image in enumerate(points)}
        save(folder / f"{name}.mdb", records, dumps(list(records)), map_size=1 << 20)
    write_tfrecord(folder / "imagenet.tfrecord", [official(n, n, boxes=n) for n in range(3)])
    write_tfrecord(folder / "tfds.tfrecord", [tfds(n, ids=[n] * n, tags=[b"x"], score=0.5) for n in range(3)])
    for name, member in MEMBERS.items():
        member.write(folder / "sources" / name, CONTENT)
    for container in ("lmdb", "hdf5"):
        converted(archives, folder / container, split="val", container=container, shard_size=150_000)
    with Loader(folder / "lmdb", batch_size=2, workers=0, transform=TrainTransform(8)) as loader:
        loader.card().save(folder / "card.json")
        (folder / "state.json").write_bytes(canonical_json(loader.state_dict()))
    write_columns(folder / "columns")
    in_place = {"container": "tar", "order": "archive"}
    converted(archives, folder / "tar", split="val", shard_size=150_000, **in_place)
    with collect(folder / "collections" / "deep" / "all", [folder / "lmdb", folder / "tar"]):
        return folder


def findings(base: Path, log: Path, cases: list[str]) -> list[str]:
    """What was wrong in which case: a process at a time works through what the one before it left."""
    found, left = [], list(cases)
    while left:
        command = [sys.executable, fuzz_targets.__file__, str(base), str(log), *left]
        environ = os.environ | {"PYTHONPATH": SUPPORT} | SMALL_POOL
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        begun = [line for line in lines if not line.startswith(" ")]
        found += [f"{at}{line}" for at, line in pairwise(lines) if line.startswith(" ")]
        if done.returncode == 0:
            break
        assert begun, done.stderr
        name, seed = begun[-1].split(":")
        found.append(f"{name}:{seed} ended its process with {done.returncode}: {done.stderr[-300:]}")
        at = next(at for at, case in enumerate(left) if case.startswith(f"{name}:"))
        left = [f"{name}:{int(seed) + 1}:{left[at].split(':')[2]}", *left[at + 1 :]]
    return found


SMALL_POOL = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # its own reserves 1 GiB of the limited address space
SMOKE = {name: 2 if name == "verified" else 6 for name in TARGETS}


@pytest.mark.slow
def test_some_odd_files_of_every_kind_are_read_or_refused(base: Path, tmp_path: Path) -> None:
    assert findings(base, tmp_path / "log", [f"{name}:0:{count}" for name, count in SMOKE.items()]) == []


@pytest.mark.torture
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TARGETS)
def test_many_odd_files_are_read_or_refused(base: Path, tmp_path: Path, name: str) -> None:
    assert findings(base, tmp_path / "log", [f"{name}:1000:{1000 + MANY[name]}"]) == []
