"""What is exported is read back by the libraries that it is for, record by record."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import warnings
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from shardprep.formats import export, open_dataset, write_dataset
from shardprep.formats.exports import parquet
from shardprep.formats.exports.export import FORMATS
from support.datasets import converted
from support.exports import READERS, Read, expected, files, mds_samples, tfrecord_features, webdataset_samples
from support.image_files import JPEG
from support.image_kinds import KINDS
from support.source_builders import write

SLOW = {"tfrecord": [pytest.mark.slow]}
every_format = pytest.mark.parametrize("to", [pytest.param(to, marks=SLOW.get(to, ())) for to in FORMATS])


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of every kind in two classes, named as they are."""
    folder = tmp_path_factory.mktemp("kinds")
    for at, (name, (image, _)) in enumerate(sorted(KINDS.items())):
        write(folder / "source" / f"class{at % 2}" / name, image)
    converted(folder / "source", folder / "out")
    return folder / "out"


def assert_read(to: str, found: list[Read], dataset: Path) -> None:
    wanted = expected(dataset)
    if to == "folders":
        found, wanted = sorted(found), sorted(wanted)
    if to in ("webdataset", "folders"):  # of what has no metadata, the key may lack or have a suffix
        assert [one[1:] for one in found] == [one[1:] for one in wanted]
        assert all(
            mine.key.startswith(one.key) or one.key.startswith(mine.key)
            for mine, one in zip(found, wanted, strict=True)
        )
    else:
        assert found == wanted


@every_format
def test_every_record_of_every_split_is_read_back(splits: Path, to: str, tmp_path: Path) -> None:
    done = export(splits, tmp_path, to=to, shard_size=150_000, workers=0)

    assert [one.split for one in done] == ["train", "val", "test"]
    for one in done:
        assert_read(to, list(READERS[to](one.path)), splits / one.split)
        assert len(one.files) > (one.split == "train")


@every_format
def test_images_of_every_kind_are_read_back(kinds: Path, to: str, tmp_path: Path) -> None:
    export(kinds, tmp_path, to=to, shard_size=4000, workers=0)

    assert_read(to, list(READERS[to](tmp_path)), kinds)
    if to == "tfrecord":
        spaces = {f["image/colorspace"].bytes_list.value[0] for f in tfrecord_features(tmp_path)}
        assert spaces == {b"RGB", b"Grayscale"}


def test_a_tar_has_whole_samples_in_order_and_members_that_say_nothing_of_the_machine(
    splits: Path, tmp_path: Path
) -> None:
    export(splits / "train", tmp_path, to="webdataset", shard_size=150_000, workers=0)

    stems = []
    for path in sorted(tmp_path.glob("*.tar")):
        assert path.stat().st_size % 512 == 0
        with tarfile.open(path, "r:") as tar:
            members = tar.getmembers()
        assert {(m.mode, m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {
            (0o444, 0, 0, 0, "", "")
        }
        names = [member.name.partition(".") for member in members]
        ends = ["jpg" if end == "png" else end for _, _, end in names]  # one PNG is among them
        assert ends == ["jpg", "cls", "boxes.json"] * (len(names) // 3)
        stems += [stem for stem, _, _ in names[::3]]
    assert [unquote(stem) for stem in stems] == [record.key for record in expected(splits / "train")]
    assert files(tmp_path, "*.tar")[1].endswith("train-000001.tar")


def test_a_long_key_is_a_name_in_a_tar(tmp_path: Path) -> None:
    name = "Ä." * 60
    write(tmp_path / "source" / "a" / f"{name}.jpg", JPEG)
    converted(tmp_path / "source", tmp_path / "dataset")

    export(tmp_path / "dataset", tmp_path / "out", to="webdataset", workers=0)

    (sample,) = webdataset_samples(tmp_path / "out")
    assert unquote(sample["__key__"]) == f"a/{name}"


@pytest.mark.slow
def test_the_official_parser_of_imagenet_reads_the_records(splits: Path, tmp_path: Path) -> None:
    import tensorflow as tf

    export(splits, tmp_path, to="tfrecord", shard_size=150_000, workers=0)
    wanted = [*expected(splits / "val"), *expected(splits / "test")]
    spec = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string, ""),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64, -1),
        "image/class/text": tf.io.FixedLenFeature([], tf.string, ""),
        **{f"image/object/bbox/{side}": tf.io.VarLenFeature(tf.float32) for side in ("xmin", "ymax")},
    }
    names = [*files(tmp_path, "val/validation-0000?-of-0000?"), *files(tmp_path, "test/test-00000-of-00001")]

    parsed = [tf.io.parse_single_example(message, spec) for message in tf.data.TFRecordDataset(names)]

    assert [int(one["image/class/label"]) - 1 for one in parsed] == [one.label for one in wanted]
    assert [bool(one["image/class/text"].numpy()) for one in parsed] == [one.label >= 0 for one in wanted]
    shapes = [tuple(tf.io.decode_jpeg(one["image/encoded"], channels=3).shape) for one in parsed]
    features = [*tfrecord_features(tmp_path / "val"), *tfrecord_features(tmp_path / "test")]
    sides = [[f[f"image/{n}"].int64_list.value[0] for n in ("height", "width")] for f in features]
    assert [list(shape[:2]) for shape in shapes] == sides
    assert {f["image/format"].bytes_list.value[0] for f in features} == {b"JPEG"}


def lines_of(program: str, *words: Path) -> list[str]:
    """What a program prints in a process of its own; its library may leave threads and warnings."""
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TFDS = """
import hashlib, os, sys
from pathlib import Path
import tensorflow as tf, tensorflow_datasets as tfds
exported, links = map(Path, sys.argv[1:])
for path in exported.glob("validation-*"):
    split, _, rest = path.name.partition("-")
    os.link(path, links / f"imagenet-{split}.tfrecord-{rest}")
f = tfds.features
sides = {side: f.Sequence(tf.float32) for side in ("xmin", "ymin", "xmax", "ymax")}
image = {"encoded": f.Image(), "class": {"label": tf.int64}, "filename": f.Text(), "object": {"bbox": sides}}
tfds.folder_dataset.write_metadata(data_dir=links, features=f.FeaturesDict({"image": image}))
skip = {"image": {"encoded": tfds.decode.SkipDecoding()}}
builder = tfds.builder_from_directory(links)
for one in builder.as_dataset(split="validation", shuffle_files=False, decoders=skip).as_numpy_iterator():
    one = one["image"]
    boxes = len(one["object"]["bbox"]["xmin"])
    print(one["filename"].decode(), one["class"]["label"], boxes, hashlib.sha256(one["encoded"]).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tensorflow_datasets") is None, reason="tensorflow-datasets is not installed")
def test_tensorflow_datasets_reads_the_records(splits: Path, tmp_path: Path) -> None:
    export(splits / "val", tmp_path / "out", to="tfrecord", shard_size=150_000, workers=0)
    (tmp_path / "links").mkdir()

    printed = lines_of(TFDS, tmp_path / "out", tmp_path / "links")

    assert [line for line in printed if line.startswith("ILSVRC")] == [
        f"{one.key} {one.label + 1} {len(one.boxes)} {hashlib.sha256(one.image).hexdigest()}"
        for one in expected(splits / "val")
    ]


def test_the_index_of_mds_has_each_shard_with_its_hash(splits: Path, tmp_path: Path) -> None:
    export(splits / "train", tmp_path, to="mds", shard_size=150_000, workers=0)

    shards = json.loads((tmp_path / "index.json").read_bytes())["shards"]

    assert [shard["raw_data"]["basename"] for shard in shards[:2]] == ["shard.00000.mds", "shard.00001.mds"]
    for shard in shards:
        data = (tmp_path / shard["raw_data"]["basename"]).read_bytes()
        assert shard["raw_data"]["hashes"] == {"sha256": hashlib.sha256(data).hexdigest()}
    sample = next(mds_samples(tmp_path))
    assert {name: encoding for name, (encoding, _) in sample.items()} == {
        "image": "jpeg", "key": "str", "label": "int", "boxes": "ndarray:float32", "box_labels": "ndarray:int32",
    }  # fmt: skip


# torchvision, which only the other datasets of this library need, may be missing beside a torch for CPUs.
STREAMING = """
import hashlib, sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
try:
    import torchvision
except ImportError:
    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = sys.modules["torchvision" + name] = module_from_spec(ModuleSpec("torchvision" + name, None))
        module.__dict__.update(VisionDataset=object, to_tensor=None)
from streaming import StreamingDataset
for one in StreamingDataset(local=sys.argv[1], shuffle=False, batch_size=1):
    print(one["key"], one["label"], hashlib.sha256(one["image"].convert("RGB").tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("streaming") is None, reason="mosaicml-streaming is not installed")
def test_streaming_reads_the_shards(splits: Path, tmp_path: Path) -> None:
    export(splits / "train", tmp_path, to="mds", shard_size=150_000, workers=0)

    assert lines_of(STREAMING, tmp_path) == [
        f"{one.key} {one.label} {hashlib.sha256(pixels(one.image)).hexdigest()}"
        for one in expected(splits / "train")
    ]


def pixels(image: bytes) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sample has damaged metadata
        with Image.open(io.BytesIO(image)) as opened:
            return opened.convert("RGB").tobytes()


@pytest.mark.parametrize(("limit", "rows"), [("MAX_IMAGES", [7, 7, 7, 3]), ("GROUP_BYTES", [1] * 24)])
def test_parquet_has_small_row_groups_and_the_features_of_hugging_face(
    limit: str, rows: list[int], splits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet, limit, rows[0])
    export(splits / "train", tmp_path, to="parquet", workers=0)

    (path,) = files(tmp_path, "train-00000-of-00001.parquet")
    file = pq.ParquetFile(path)
    features = json.loads(file.schema_arrow.metadata[b"huggingface"])["info"]["features"]

    with open_dataset(splits / "train") as opened:
        assert features["label"] == {"_type": "ClassLabel", "names": list(opened.classes)}
    assert features["image"] == {"_type": "Image"}
    assert file.metadata.num_rows == 24
    assert [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)] == rows
    assert parquet.MAX_IMAGES <= 100


def test_croissant_describes_each_file_class_and_field(splits: Path, tmp_path: Path) -> None:
    (done,) = export(splits / "train", tmp_path, to="croissant", shard_size=150_000, workers=0)

    found = json.loads((tmp_path / "croissant.json").read_text())

    *listed, together = found["distribution"]
    sizes = {path.name: f"{path.stat().st_size} B" for path in tmp_path.glob("*.parquet")}
    assert {file["@id"]: file["contentSize"] for file in listed} == sizes
    assert [f"sha256:{file['sha256']}" for file in listed] == [file.sha256 for file in done.files[:-1]]
    assert (found["identifier"], together["includes"]) == (done.root, "*.parquet")
    with open_dataset(splits / "train") as opened:
        assert [one["classes/name"] for one in found["recordSet"][0]["data"]] == list(opened.classes)


def test_mlcroissant_reads_images_labels_boxes_and_columns(splits: Path, tmp_path: Path) -> None:
    mlcroissant = pytest.importorskip("mlcroissant")
    values = {"score": 1.5, "caption": "a photograph", "points": np.arange(6, dtype=np.int16).reshape(3, 2)}
    items = [{"image": JPEG, "label": 0, "key": f"k{number}", **values} for number in range(3)]
    write_dataset(items, tmp_path / "dataset", workers=0)
    export(tmp_path / "dataset", tmp_path / "columns", to="croissant", workers=0)
    export(splits / "train", tmp_path / "boxes", to="croissant", workers=0)

    def records(folder: Path) -> list[dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pandas, and of the damaged metadata of a photograph
            described = mlcroissant.Dataset(jsonld=str(folder / "croissant.json"))
            return [dict(record) for record in described.records("records")]

    first = next(one for one in records(tmp_path / "columns") if one["records/key"] == b"k0")
    assert (first["records/label"], first["records/score"]) == (0, 1.5)
    assert first["records/caption"] == b"a photograph"
    assert first["records/points"] == [[0, 1], [2, 3], [4, 5]]
    with Image.open(io.BytesIO(JPEG)) as image:
        assert first["records/image"].size == image.size
    wanted = {one.key.encode(): (one.label, len(one.boxes)) for one in expected(splits / "train")}
    found = records(tmp_path / "boxes")
    assert {one["records/key"]: (one["records/label"], len(one["records/boxes"])) for one in found} == wanted


def test_image_folder_finds_the_labels(splits: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    export(splits / "train", tmp_path, to="folders", workers=0)

    found = datasets.ImageFolder(str(tmp_path))

    wanted = Counter(one.label for one in expected(splits / "train"))
    assert Counter(label for _, label in found.samples) == wanted


def test_floats_that_json_does_not_have_come_back_from_webdataset(tmp_path: Path) -> None:
    scores = [1.5, float("nan"), float("inf"), float("-inf"), -0.0]
    items = [
        {"image": JPEG, "key": f"k{n}", "score": scores[n], "plain": n / 3, "pair": np.full(2, scores[n])}
        for n in range(5)
    ]
    write_dataset(items, tmp_path / "dataset", workers=0)
    export(tmp_path / "dataset", tmp_path / "out", to="webdataset", workers=0)
    export(tmp_path / "dataset", tmp_path / "tree", to="folders", workers=0)

    converted(tmp_path / "out", tmp_path / "again")

    text = (tmp_path / "tree/metadata.jsonl").read_text()
    assert [text.count(f'"pair": [{x}, {x}]') for x in ("1.5", "null", "-0.0")] == [1, 3, 1]
    with open_dataset(tmp_path / "again") as found:
        columns = {record.key: record.columns for record in found}
    assert [repr(columns[f"k{n}"]["score.json"]) for n in range(5)] == list(map(repr, scores))
    assert [columns[f"k{n}"]["plain.json"] for n in range(5)] == [n / 3 for n in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["webdataset", "tfrecord", "parquet", "croissant", "folders"])
def test_what_was_exported_can_be_converted_again(splits: Path, to: str, tmp_path: Path) -> None:
    export(splits / "train", tmp_path / "out", to=to, shard_size=150_000, workers=0)

    converted(tmp_path / "out", tmp_path / "again")

    found = expected(tmp_path / "again")
    assert {(one.label, one.image) for one in found} == {
        (one.label, one.image) for one in expected(splits / "train")
    }
    assert len(found) == 24
