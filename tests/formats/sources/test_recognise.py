"""Every layout gives the same records, split as was asked for; what cannot be is refused."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats import PlanMismatch, convert, repair
from shardprep.formats.errors import LabelConflict, SourceDamaged, UsageError
from shardprep.formats.records.record import LabelSpace
from shardprep.formats.sources.listing import EntryTable, GrowingTable, StoredEntries
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import Problems, SourceOptions, entry_dtype
from support.column_sources import write_pictures
from support.datasets import prep_here
from support.file_changes import CHANGES
from support.image_files import encoded, pixels
from support.source_builders import DEVKIT, TEST, TRAIN, Miniature, contents, write

LAYOUTS: dict[str, Callable[[Miniature, Path], Path]] = {
    "tars": Miniature.write_tars,
    "tree": Miniature.write_tree,
    "tree with val in folders": lambda mini, folder: mini.write_tree(folder, foldered_val=True),
    "kaggle": Miniature.write_kaggle,
}

numbers = st.lists(st.integers(0, 99_999), min_size=1, max_size=3, unique=True).map(tuple)
miniatures = st.builds(
    lambda order, images, truth: Miniature(order, dict(zip(order, images, strict=True)), truth),
    order=st.permutations(["n01440764", "n02100735", "n02119789"]).map(tuple),
    images=st.lists(numbers, min_size=3, max_size=3),
    truth=st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple),
)


@given(mini=miniatures)
@settings(max_examples=20, deadline=None)
def test_every_layout_gives_the_same_keys_labels_and_bytes(
    mini: Miniature, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name, lay_out in LAYOUTS.items():
        folder = lay_out(mini, tmp_path_factory.mktemp("source"))
        mini.write_devkit(folder)
        source = recognise(folder)
        assert {split: contents(source.listing(split)) for split in source.splits} == mini.records, name
        assert {source.listing(split).labels.digest for split in source.splits} == {
            LabelSpace.of(mini.wnids).digest
        }


def test_each_split_is_taken_from_the_layout_that_has_it_and_from_tars_where_both_do(tmp_path: Path) -> None:
    mixed = Miniature().write_tree(Miniature().write_tars(tmp_path))
    (mixed / TRAIN).unlink()
    source = recognise(mixed)
    assert source.description == (
        "train of extracted-tree, val of official-tars, test of official-tars with devkit (3 classes)"
    )
    assert {split: contents(source.listing(split)) for split in source.splits} == Miniature().records
    layouts = [source.listing(split).layout for split in source.splits]
    assert layouts == ["extracted-tree", "official-tars", "official-tars"]
    assert mixed.resolve() / "train" in source.folders
    assert source.boxes("val", source.listing("val").labels) is None

    (mixed / TEST).unlink()
    shutil.rmtree(mixed / "test")
    with pytest.raises(UsageError, match="no split 'test'; it has train, val"):
        recognise(mixed).listing("test")
    with pytest.raises(UsageError, match="not 'dev'"):
        recognise(mixed, split="dev")
    (mixed / DEVKIT).unlink()
    assert len(recognise(mixed).listing("train").labels) == 1000
    write(mixed / "train/cat/1.jpg", b"x")
    assert len(recognise(mixed).survey("train").labels) == 1000
    with pytest.raises(LabelConflict, match="cat is not one of the 1,000 classes"):
        recognise(mixed).listing("train")


def test_many_rows_come_back_in_their_order() -> None:
    table = GrowingTable(np.dtype([("key", "S1"), ("x", "<f8")]))
    rows = [(b"%x" % i, float(i)) for i in range(40_000)]
    for row in rows:
        table.append(row)
    assert table.finish().tolist() == rows


def test_a_key_too_long_for_a_record_is_named_and_repeated_ones_are_counted() -> None:
    problems = Problems()
    table = EntryTable(Path("src"), problems, [("line", "<i8")])
    table.append("a" * 1025, 0, length=1, extra=(1,))
    for line in range(60_000):
        table.append(str(line % 30_000), 0, length=1, extra=(line,))
    table.finish()
    long, twice = problems
    assert re.match("src: a+…a+: .*shorten", str(long))
    assert str(twice).startswith("src: 0: lines 0 and 30000 have")
    assert twice.count == 30_000


def test_a_damaged_listing_that_was_stored_is_an_error(tmp_path: Path) -> None:
    stored = StoredEntries(tmp_path, {"archive": "a.tar"})
    stored.write(np.zeros(3, entry_dtype(1, 1)), tmp_path)
    (file,) = tmp_path.iterdir()
    file.chmod(0o644)
    os.truncate(file, 200)
    with pytest.raises(SourceDamaged, match=r"entries-.*; remove this file"):
        stored.read()


MINI = Miniature()
NO_UTF8 = os.fsdecode(b"\xff.JPEG")
IMAGE = Path("train/n01440764/n01440764_7.JPEG")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    MINI.write_devkit(tmp_path / "tree")
    return MINI.write_tree(tmp_path / "tree")


BELOW = ["v4/data/train/cat/1.jpg", "v4/data/valid/cat/2.jpg"]


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ([*BELOW, "README.txt"], "v4: holds folders .*; give the folder that holds the splits .* or a list"),
        (["data/train/cat/1.jpg", "data/1.jpg"], "data: holds folders .*; give the folder that holds the splits"),
        (["train/cat/1.jpg", "val/cat/1.jpg", "validation/cat/1.jpg"], "holds val and validation, both for val; move"),
        (["cat/1.jpg", "dog/1.jpg", "test/1.jpg"], "holds test beside other folders of images: cat, dog; rename it"),
        (["train2017/1.jpg", "val2017/1.jpg", "b/captions.json"], "holds train2017 and val2017, .* --split, .* --coco"),
        (["train/train/cat/1.jpg", "test/1.jpg"], "train/train: holds folders .*; give the folder that holds"),
        ([], "is an empty folder$"),
        (["data-00000-of-00001.arrow", "state.json"], "saved by datasets' save_to_disk; write it with to_parquet"),
        (["train/1.jpg", "train/metadata.parquet"], "parquet: is not read beside images; write .* metadata.jsonl"),
        (["1.jpg"], "outside class folders.*sort them into <class>/, or, .* convert a list.*metadata.csv"),
        (["train/1.jpg", "a.csv"], "train: holds images outside .*, if a.csv has the labels, convert that"),
    ],
)  # fmt: skip
def test_folders_that_are_no_splits_and_classes_say_what_would_help(
    files: list[str], match: str, tmp_path: Path
) -> None:
    for name in files:
        write(tmp_path / name, b"x")
    with pytest.raises(UsageError, match=match):
        recognise(tmp_path).listing("train")


def test_classes_may_have_the_same_file_names_and_are_no_splits(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "dog/1.jpg", "images/2.jpg", "1.png"):
        write(tmp_path / name, b"x")
    assert recognise(tmp_path).description == "class-folders: train (3 classes)"
    for name in ("train/cat/1.jpg", "train/labels.csv", "val/dog/1.jpg", ".of/test/1.jpg", ".of/a.csv"):
        write(tmp_path / name, b"x")
    *left_out, table = recognise(tmp_path).listing("train").notes
    others = "folders with images that are left out: cat, dog, images"
    assert left_out == [others, f"images directly in {tmp_path} are left out"]
    has_it = "; if labels.csv has the labels, convert that file, with --root"
    assert table == f"the folders are the classes{has_it}"
    assert recognise(tmp_path / "train").listing("train").notes == (f"the only class is cat{has_it}",)
    assert recognise(tmp_path / ".of").listing("test").notes == ()
    for name, note in (("9", "the only class is 9; if another"), ("10", "10 has the label 0; to keep")):
        write(tmp_path / "of" / name / "1.jpg", b"x")
        assert note in recognise(tmp_path / "of").listing("train").notes[0]


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["images/1.jpg", "masks/1.png"], "images and masks"),
        (["images/a/1.jpg", "Labels/a/1_seg.png"], "images and Labels"),
        (["imgs/train/1.jpg", "masks/train/1.png", "depth/train/1.png"], "imgs and depth, masks"),
        (["train/rgb/1.jpg", "train/so so/1.png", "train/other/2.png"], "rgb and so so"),
        (["images/1.jpg", "annotations/a/labels.json"], "images and annotations"),
        (["DUTS-TR-Image/1.jpg", "DUTS-TR-Mask/1.png"], "DUTS-TR-Image and DUTS-TR-Mask"),
        (["Original/1.png", "Ground Truth/1.png"], "Original and Ground Truth"),
    ],
)
def test_images_beside_masks_are_no_classes(files: list[str], names: str, tmp_path: Path) -> None:
    for name in files:
        write(tmp_path / name, b"x")
    expected = f"holds {names}, which are not classes; .*--pair.*--coco.*metadata.csv"
    with pytest.raises(UsageError, match=expected):
        recognise(tmp_path).listing("train")


def test_files_that_are_no_images_are_left_out_on_request(tmp_path: Path) -> None:
    source, image = tmp_path / "s", encoded(pixels(8, 8), ".png")
    for split in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            write(source / split / name / f"{number}.png", image)
    write(source / "train/cat/notes.txt", b"BM a text that begins as a bitmap does")
    write(source / "train/README", b"hello")
    write(source / "train/cat/@eaDir/0.png/SYNOPHOTO_THUMB_XL.jpg", image)
    write(source / "train/lost+found/1.png", image)
    write(source / "val/dog/more/Makefile", b"")
    write(source / "val/dog/without-extension", image)
    words = ("convert", source, tmp_path / "out", "--workers", 0, "--quiet")

    refused = [prep_here(*words), prep_here(*words, "--dry-run")]
    done = prep_here(*words, "--skip-non-images", "--json", "--restart")
    write(source / "train/cat/cut.png", image[:-9])
    write(source / "train/cat/error.jpg", b"<html>404</html>")
    damaged = prep_here(*words[:2], tmp_path / "other", *words[3:], "--skip-non-images", "--dry-run")

    for one in refused:
        assert one.returncode == 1
        assert "--skip-non-images" in one.stdout + one.stderr
    found = json.loads(done.stdout)["splits"]
    assert [(one["records"], one["ignored"]) for one in found] == [
        (2, {"non-image files": 2, "@eaDir": 1, "lost+found": 1}),
        (3, {"non-image files": 1}),
    ]
    assert damaged.returncode == 1
    assert re.search(r"error\.jpg: not an image \(starts with 3c 68 74 6d 6c 3e 34 30\)\n", damaged.stdout)
    assert "cut.png: truncated" in damaged.stdout
    (tmp_path / "out/train/shard-00000.lmdb").unlink()
    for name in ("cut.png", "error.jpg"):
        (source / "train/cat" / name).unlink()
    assert repair(tmp_path / "out/train", source, workers=0).exit_code == 0


@pytest.mark.parametrize("place", ["test/test", "test/images", "val/images"])
def test_images_without_classes_may_lie_in_a_folder_of_their_own(place: str, tree: Path) -> None:
    (tree / (split := place.partition("/")[0])).rename(tree / "moved")
    (tree / split).mkdir()
    (tree / "moved").rename(tree / place)
    assert contents(recognise(tree).listing(split)) == MINI.records[split]


@pytest.mark.parametrize("target", ["train/n01440764/link", "train/link", "val/link.JPEG"])
def test_a_link_in_the_tree_is_an_error(target: str, tree: Path) -> None:
    (tree / target).symlink_to(tree / "train/n02100735")
    with pytest.raises(SourceDamaged, match="symbolic link"):
        [recognise(tree).listing(split) for split in ("train", "val")]
    (tree / target).unlink()
    CHANGES["a link"](tree / "train")
    with pytest.raises(SourceDamaged, match="train: is a symbolic link"):
        recognise(tree).listing("train")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda tree: os.mkfifo(tree / "train/n01440764/fifo"), SourceDamaged, "neither a file nor a folder"),
        (lambda tree: os.mkfifo(tree / "train/fifo"), SourceDamaged, "train/fifo: .*neither a file nor a folder"),
        (lambda tree: write(tree / "train/n01440764" / NO_UTF8, b"x"), SourceDamaged, r"udcff\.JPEG: .* not UTF-8"),
        (lambda tree: write(tree / "train/n01443537/1.JPEG", b"x"), LabelConflict, "n01443537 is not one of the 3"),
        (lambda tree: write(tree / "LOC_synset_mapping.txt", b"n01440764 tench\n"), LabelConflict, "n02100735"),
    ],
)  # fmt: skip
def test_what_does_not_belong_in_the_tree_is_an_error(
    change: Callable[[Path], None], error: type[Exception], match: str, tree: Path
) -> None:
    change(tree)
    with pytest.raises(error, match=match):
        recognise(tree).listing("train")


@pytest.mark.parametrize("change", ["rewritten", "cut", "a link", "a fifo", "a folder", "gone"])
def test_a_file_that_changed_since_it_was_listed_is_an_error(change: str, tree: Path) -> None:
    listing = recognise(tree).listing("train")
    entry = listing.entries[listing.entries["key"] == b"n01440764/n01440764_7"][0]
    with listing.reader.open() as reader:
        CHANGES[change](tree / IMAGE)
        with pytest.raises(SourceDamaged, match=f"{IMAGE}: changed"):
            reader.read(entry)


def test_a_class_of_links_is_not_called_empty(tmp_path: Path) -> None:
    write(tmp_path / "cat/1.jpg", b"x")
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog/1.jpg").symlink_to("../cat/1.jpg")
    (problem,) = recognise(tmp_path).survey("train").problems
    assert "--follow-symlinks" in str(problem)


FOLLOW = SourceOptions(follow_symlinks=True)


def test_links_are_followed_on_request_two_to_one_folder_are_no_loop_and_it_belongs_to_the_source(
    tmp_path: Path,
) -> None:
    source, other, val = tmp_path / "source", tmp_path / "other", tmp_path / "elsewhere"
    write(other / "1.jpg", b"x")
    write(val / "cat/2.jpg", b"x")
    (source / "train").mkdir(parents=True)
    for link, folder in (("train/cat", other), ("train/dog", other), ("val", val)):
        (source / link).symlink_to(folder)

    found = recognise(source, options=FOLLOW)
    assert {other, val} <= {*found.folders}
    assert [*contents(found.listing("train"))] == ["cat/1.jpg", "dog/1.jpg"]


@pytest.mark.parametrize("target", [".", "..", "self"])
def test_a_loop_of_links_is_an_error_and_ends(target: str, tmp_path: Path) -> None:
    write(tmp_path / "cat/1.jpg", b"x")
    (tmp_path / "cat/self").symlink_to(target)
    with pytest.raises(SourceDamaged, match="nor a link" if target == "self" else "folder that contains it"):
        recognise(tmp_path, options=FOLLOW).listing("train")


def test_train_and_val_are_disjoint_and_complete_and_another_fraction_is_refused(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    write_pictures(photos, [f"{name}/{n}.png" for name in ("cat", "dog") for n in range(10)])
    whole = contents(recognise(photos).listing("train"))
    source = recognise(photos, options=SourceOptions(False, 0.2), seed=3)  # by position, as in 0.2

    train, val = (contents(source.listing(split)) for split in source.splits)

    assert (source.splits, len(val)) == (("train", "val"), 4)
    assert train | val == whole
    assert train.keys().isdisjoint(val)
    convert(photos, tmp_path / "out", source_options=SourceOptions(val_fraction=np.float64(0.2)), workers=0)
    with pytest.raises(PlanMismatch, match=r"dataset: --val-fraction was 0\.2, is now 0\.4; choose"):
        convert(photos, tmp_path / "out", source_options=SourceOptions(val_fraction=0.4), workers=0)
    with pytest.raises(UsageError, match="no images of the split val; the val fraction selects none"):
        convert(photos, tmp_path / "none", source_options=SourceOptions(val_fraction=0.01), workers=0)
    assert val.keys() == {"cat/0.png", "cat/8.png", "dog/0.png", "dog/4.png"}  # a seed draws the same forever


WRONG_OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    *(("table", {"val_fraction": share}, "above 0 and below 1") for share in (0.0, 1.0, -0.1, np.nan, "0.1")),
    ("table", {"columns": ("age:",)}, r"expected NAME\[:KIND\]\[=HEADER\]"),
    ("table", {"columns": ("age:number",)}, "unknown kind 'number'"),
    ("table", {"columns": ("old:int=Old",)}, "no column 'Old'; its columns are: file_name, age"),
    ("table", {"columns": ("mask:image=age",)}, "--pair"),
    ("table", {"columns": ("a:int=age", "b:int=age")}, "the column 'age' of the table is chosen twice"),
    *(("table", {"columns": wrong}, "must be a list") for wrong in ("age:int", 5, [5])),
    *(("table", {name: Path("x")}, f"{name} must be text") for name in ("coco", "path_column")),
    ("table", {"root": "."}, "--root: not for metadata"),
    *((name, {"pairs": ("mask=masks",)}, r"several kinds: .*prep join") for name in ("table", "both")),
    ("list.txt", {"root": "nowhere"}, "is not a folder"),
    ("list.txt", {"pairs": ("mask=masks",)}, r"--pair: not for image-list: .* prep join"),
    ("pairs", {"pairs": ("mask=nowhere",)}, "there is no folder [^ ]*nowhere; give"),
    *(("pairs", {"pairs": (f"mask={at}images",)}, "holds the images themselves") for at in ("", "masks/../")),
    ("pairs", {"pairs": ("mask=same",), "follow_symlinks": True}, "holds the images themselves"),
    *(("pairs", {"pairs": (wrong,)}, "expected NAME=FOLDER") for wrong in ("mask", "mask:text=masks")),
    ("pairs", {"pairs": ("key=masks",)}, "reserved"),
    ("tars", {"image_column": "jpg"}, r"--image-column: not for official-tars"),
]


@pytest.mark.parametrize(("source", "options", "match"), WRONG_OPTIONS)
def test_options_that_mean_nothing_for_a_source_are_refused(
    source: str, options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    folders = ("table", "table/masks", "pairs/images", "pairs/masks", "both/images", "both/masks")
    write_pictures(tmp_path, [f"{folder}/0.png" for folder in folders])
    for folder in ("table", "both/images"):
        write(tmp_path / folder / "metadata.csv", b"file_name,age\n0.png,1\n")
    write(tmp_path / "list.txt", b"table/0.png cat\n")
    (tmp_path / "pairs/same").symlink_to("images")
    MINI.write_tars(tmp_path / "tars")

    with pytest.raises(UsageError, match=match):
        recognise(tmp_path / source, options=SourceOptions(**options)).listing("train")
    with pytest.raises(UsageError, match="--check-md5: only for official archives, not for image-list"):
        recognise(tmp_path / "list.txt", check_md5=True)
