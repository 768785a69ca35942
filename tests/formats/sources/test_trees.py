import json
import os
import pickle
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import convert, open_dataset, repair
from shardprep.formats.errors import LabelConflict, SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.records.labels import official_words
from shardprep.formats.records.record import MAX_IMAGE_BYTES
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.source import SourceOptions
from shardprep.formats.sources.trees import files_below
from support.column_sources import coco_instances
from support.datasets import prep_here
from support.image_files import encoded, pixels
from support.source_builders import Miniature, contents, image, write

MINI = Miniature()
IMAGE = Path("train/n01440764/n01440764_7.JPEG")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    MINI.write_devkit(tmp_path / "tree")
    return MINI.write_tree(tmp_path / "tree")


def test_folders_below_a_class_are_entered_and_litter_is_not(tmp_path: Path) -> None:
    for name in (
        "cat/1.jpg",
        "cat/black/old/2.jpg",
        "cat/.DS_Store",
        "cat/Thumbs.db",
        ".git/x",
        "dog/desktop.ini",
        "dog/3.jpg",
    ):
        write(tmp_path / name, image(name))
    listing = recognise(tmp_path).listing("train")
    labels = {"cat/1.jpg": 0, "cat/black/old/2.jpg": 0, "dog/3.jpg": 1}
    assert contents(listing) == {name: (label, image(name)) for name, label in labels.items()}
    assert [c.name for c in listing.labels.classes] == ["cat", "dog"]
    assert listing.expected is None


def test_class_folders_alone_are_train_or_the_split_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "cat/1.jpg", b"x")
    assert recognise(tmp_path).splits == ("train",)
    assert recognise(tmp_path, split="val").splits == ("val",)
    assert [*contents(recognise(tmp_path, split="val").listing("val"))] == ["cat/1.jpg"]


def test_splits_of_class_folders_share_their_label_space(tmp_path: Path) -> None:
    for name in ("train/dog/1.jpg", "val/cat/1.jpg", "test/dog/2.jpg"):
        write(tmp_path / name, b"x")
    source = recognise(tmp_path)
    assert source.description == "extracted-tree: train, val, test (2 classes)"
    assert {split: contents(source.listing(split)) for split in source.splits} == {
        "train": {"dog/1.jpg": (1, b"x")},
        "val": {"cat/1.jpg": (0, b"x")},
        "test": {"dog/2.jpg": (1, b"x")},
    }


def test_a_class_folder_without_an_image_is_an_error_that_names_it(tmp_path: Path) -> None:
    write(tmp_path / "train/cat/1.jpg", b"x")
    (tmp_path / "train/dog/old").mkdir(parents=True)
    with pytest.raises(SourceDamaged, match="train/dog: this class has no image"):
        recognise(tmp_path).listing("train")


def test_an_empty_class_folder_is_counted_where_the_devkit_knows_how_many_there_are(tree: Path) -> None:
    for path in (tree / "train/n02119789").iterdir():
        path.unlink()
    listing = recognise(tree).listing("train")
    assert (len(listing.entries), listing.expected, listing.shortfall) == (3, 6, "n02119789 has 0 of 3")


@pytest.mark.parametrize("parent", ["dataset/train", "dataset/a", "a/b"])
def test_a_folder_of_datasets_is_not_taken_for_a_folder_of_classes(parent: str, tmp_path: Path) -> None:
    write(tmp_path / "cat/1.jpg", b"x")
    write(tmp_path / parent / "cat/1.jpg", b"x")
    write(tmp_path / Path(parent).parent / "LOC_val_solution.csv", b"x")
    with pytest.raises(UsageError, match=r"holds folders but no images, so it is not a class; .*: give "):
        recognise(tmp_path)


@pytest.mark.parametrize("more", [[], ["v5/data/val/cat/1.jpg"], ["README.txt"]])
def test_splits_in_a_folder_below_are_named(more: list[str], tmp_path: Path) -> None:
    for name in ("v4/data/train/cat/1.jpg", "v4/data/valid/cat/2.jpg", *more):
        write(tmp_path / name, b"x")
    with pytest.raises(UsageError, match=rf"v4: holds folders.*: give {tmp_path}/v4/data$"):
        recognise(tmp_path)


def test_a_folder_of_splits_with_an_image_in_it_is_no_class(tmp_path: Path) -> None:
    for name in ("data/train/cat/1.jpg", "data/overview.png"):
        write(tmp_path / name, b"x")
    with pytest.raises(UsageError, match=rf"holds splits, so it is not a class; .*: give {tmp_path}/data$"):
        recognise(tmp_path)


@pytest.mark.parametrize(
    "names", [("training", "valid", "testing"), ("Train", "validation", "TEST"), ("eval",)]
)
def test_splits_under_their_other_names_are_taken(names: tuple[str, ...], tmp_path: Path) -> None:
    splits = ("train", "val", "test") if len(names) == 3 else ("val",)
    for name in names:
        write(tmp_path / name / f"cat/{name}.png", encoded(pixels(8, 8), ".png"))

    done = convert(tmp_path, tmp_path / "out", workers=0)

    assert [(one.path.name, one.manifest.split) for one in done] == [*zip(splits, splits, strict=True)]
    for one, name in zip(done, names, strict=True):
        with open_dataset(one.path) as opened:
            assert [record.key for record in opened] == [f"cat/{name}.png"]


def test_two_folders_of_one_split_are_refused(tmp_path: Path) -> None:
    for name in ("train", "val", "validation"):
        write(tmp_path / name / "cat/1.jpg", b"x")
    with pytest.raises(UsageError, match="holds val and validation, both for val; move one of them away"):
        recognise(tmp_path)


def test_a_class_that_is_named_like_a_split_does_not_leave_out_the_others(tmp_path: Path) -> None:
    for name in ("cat", "dog", "test"):
        write(tmp_path / name / "1.jpg", b"x")
    with pytest.raises(UsageError, match=r"holds test beside other folders of images: cat, dog; rename it"):
        recognise(tmp_path)

    write(tmp_path / "train/cat/1.jpg", b"x")
    (note,) = recognise(tmp_path).listing("train").notes
    assert note == "folders with images that are left out: cat, dog"


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["images/1.jpg", "masks/1.png"], "run: prep convert {} OUTPUT --pair mask=masks"),
        (["images/a/1.jpg", "Labels/a/1_seg.png"], "run: prep convert {} OUTPUT --pair Labels=Labels"),
        (
            ["imgs/train/1.jpg", "masks/train/1.png", "depth/train/1.png"],
            "run: prep convert {} OUTPUT --pair depth=depth --pair mask=masks",
        ),
        (["train/rgb/1.jpg", "train/so so/1.png"], "run: prep convert {} OUTPUT --pair 'so_so=so so'"),
        (
            ["images/1.jpg", "annotations/a/labels.json"],
            "run: prep convert {} OUTPUT --coco annotations/a/labels.json",
        ),
        (["images/1.jpg", "labels/1.json"], "write its values to metadata.csv beside the images"),
        (["images/1.jpg", "labels/1.txt"], "write its values to metadata.csv beside the images"),
    ],
)
def test_images_beside_masks_are_no_classes(files: list[str], advice: str, tmp_path: Path) -> None:
    for name in files:
        write(tmp_path / name, encoded(pixels(8, 8), ".png"))
        if name.endswith("labels.json"):
            write(tmp_path / name, json.dumps(coco_instances(["1.jpg"])).encode())

    with pytest.raises(UsageError, match="and their annotations, not classes; ") as found:
        recognise(tmp_path).listing("train")

    assert advice.format(tmp_path) in str(found.value)
    if "run" in advice:
        command = shlex.split(advice.format(tmp_path).replace("OUTPUT", str(tmp_path / "out")))[2:]
        assert prep_here(*command, "--workers", 0).returncode == ("1_seg" in files[1])


def test_other_classes_with_the_same_file_names_stay_classes(tmp_path: Path) -> None:
    for name in ("cat/1.jpg", "dog/1.jpg", "images/2.jpg"):
        write(tmp_path / name, b"x")
    assert recognise(tmp_path).description == "class-folders: train (3 classes)"


def test_files_that_are_no_images_are_left_out_on_request(tmp_path: Path) -> None:
    source, image = tmp_path / "s", encoded(pixels(8, 8), ".png")
    for split in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            write(source / split / name / f"{number}.png", image)
    write(source / "train/cat/notes.txt", b"BM a text that begins as a bitmap does")
    write(source / "train/README", b"hello")
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
        (2, {"non-image files": 2}),
        (3, {"non-image files": 1}),
    ]
    assert damaged.returncode == 1
    assert re.search(r"error\.jpg: not an image \(starts with 3c 68 74 6d 6c 3e 34 30\)\n", damaged.stdout)
    assert "cut.png: truncated" in damaged.stdout
    (tmp_path / "out/train/shard-00000.lmdb").unlink()
    for name in ("cut.png", "error.jpg"):
        (source / "train/cat" / name).unlink()
    assert repair(tmp_path / "out/train", source, workers=0).exit_code == 0


def test_the_folders_in_which_a_new_file_may_become_an_image_are_known(tmp_path: Path) -> None:
    MINI.write_tree(tmp_path / "tree")
    write(tmp_path / "classes/cat/1.jpg", b"x")
    (tmp_path / "link").symlink_to(tmp_path / "tree")
    splits = tuple(tmp_path.resolve() / "tree" / split for split in ("train", "val", "test"))
    assert recognise(tmp_path / "link").folders == splits
    assert recognise(tmp_path / "classes").folders == (tmp_path.resolve() / "classes",)


def test_all_official_class_folders_make_the_official_number_expected(tmp_path: Path) -> None:
    for wnid in official_words():
        (tmp_path / "train" / wnid).mkdir(parents=True)
    listing = recognise(tmp_path).listing("train")
    assert listing.expected == 1_281_167
    assert listing.shortfall.endswith("997 more classes differ")


def test_flat_val_without_labels_is_an_error_that_says_what_to_add(tmp_path: Path) -> None:
    MINI.write_tree(tmp_path)
    with pytest.raises(SourceIncomplete, match=r"LOC_val_solution\.csv or Caffe's val\.txt"):
        recognise(tmp_path).listing("val")


def test_val_in_class_folders_needs_no_other_labels(tmp_path: Path) -> None:
    MINI.write_tree(tmp_path, foldered_val=True)
    assert contents(recognise(tmp_path).listing("val")) == MINI.records["val"]


def test_a_list_that_is_not_caffes_is_left_alone(tmp_path: Path) -> None:
    MINI.write_tree(tmp_path, foldered_val=True)
    write(tmp_path / "val.txt", b"val/cat/1.jpg\n")
    assert contents(recognise(tmp_path).listing("val")) == MINI.records["val"]


def test_a_class_folder_that_the_devkit_does_not_know_is_a_conflict(tree: Path) -> None:
    write(tree / "train/n01443537/n01443537_1.JPEG", b"x")
    with pytest.raises(LabelConflict, match="n01443537 is not one of the 3 classes"):
        recognise(tree).listing("train")


def test_the_test_images_may_lie_in_a_folder_of_their_own(tree: Path) -> None:
    (tree / "test").rename(tree / "moved")
    (tree / "test").mkdir()
    (tree / "moved").rename(tree / "test/test")
    assert contents(recognise(tree).listing("test")) == MINI.records["test"]


def test_an_image_beside_the_class_folders_is_an_error_and_a_note_is_not(tree: Path) -> None:
    write(tree / "train/README.txt", b"hello")
    assert len(recognise(tree).listing("train").entries) == 6
    write(tree / "train/lost.JPEG", b"x")
    with pytest.raises(SourceDamaged, match=r"lost\.JPEG: is not in a class folder"):
        recognise(tree).listing("train")


def test_a_flat_train_folder_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "train/1.jpg", b"x")
    with pytest.raises(SourceDamaged, match="is not in a class folder"):
        recognise(tmp_path).listing("train")


def test_one_image_in_two_folders_is_an_error(tree: Path) -> None:
    write(tree / "train/n01440764/copy" / IMAGE.name, b"x")
    with pytest.raises(SourceDamaged, match="n01440764/n01440764_7: two images"):
        recognise(tree).listing("train")


def test_a_file_too_large_to_be_an_image_is_an_error(tree: Path) -> None:
    os.truncate(tree / IMAGE, MAX_IMAGE_BYTES + 1)
    with pytest.raises(SourceDamaged, match="n01440764_7: has 67108865 bytes"):
        recognise(tree).listing("train")


@pytest.mark.parametrize("target", ["train/n01440764/link", "train/link", "val/link.JPEG"])
def test_a_link_in_the_tree_is_an_error(target: str, tree: Path) -> None:
    (tree / target).symlink_to(tree / "train/n02100735")
    with pytest.raises(SourceDamaged, match="symbolic link"):
        [recognise(tree).listing(split) for split in ("train", "val")]


def test_the_folder_of_a_split_may_not_be_a_link(tree: Path) -> None:
    (tree / "train").rename(tree / "moved")
    (tree / "train").symlink_to(tree / "moved")
    with pytest.raises(SourceDamaged, match="train: is a symbolic link"):
        recognise(tree).listing("train")


@pytest.mark.parametrize("target", ["train", "train/n01440764"])
def test_a_folder_swapped_for_a_link_at_any_moment_is_not_followed(
    target: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(recognise(tree).listing("train"))
    twin, moved, left = Path(shutil.copytree(tree / target, tmp_path / "twin")), tmp_path / "moved", 0
    for file in files_below(twin):
        status = (twin / file.path).stat()
        (twin / file.path).write_bytes(b"another image"[: status.st_size].ljust(status.st_size))
        os.utime(twin / file.path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def scandir(place: object, real: Any = os.scandir) -> Any:
        nonlocal left
        left -= 1
        if not left:
            (tree / target).rename(moved)
            (tree / target).symlink_to(twin)
        return real(place)

    monkeypatch.setattr(os, "scandir", scandir)
    for moment in range(1, 1000):
        left = moment
        with suppress(SourceDamaged):
            assert contents(recognise(tree).listing("train")) == expected
        if left > 0:
            assert moment > 5
            return
        (tree / target).unlink()
        moved.rename(tree / target)


@pytest.mark.parametrize("target", ["train/n01440764/fifo", "train/fifo"])
def test_a_fifo_in_the_tree_is_an_error_and_not_waited_for(target: str, tree: Path) -> None:
    os.mkfifo(tree / target)
    with pytest.raises(SourceDamaged, match="neither a file nor a folder"):
        recognise(tree).listing("train")


def test_the_source_itself_may_be_a_link(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree)
    assert contents(recognise(tmp_path / "link").listing("train")) == MINI.records["train"]


def test_a_name_that_is_not_utf8_is_an_error(tree: Path) -> None:
    Path(os.fsdecode(os.fsencode(tree / "train/n01440764") + b"/\xff.JPEG")).write_bytes(b"x")
    with pytest.raises(SourceDamaged, match=r"xff\.JPEG' in this folder is not UTF-8"):
        recognise(tree).listing("train")


def test_very_deep_folders_are_walked(tmp_path: Path) -> None:
    deep = tmp_path / "train/cat" / "/".join("d" * 400)
    write(deep / "1.jpg", b"x")
    assert len(recognise(tmp_path).listing("train").entries) == 1


@pytest.mark.parametrize("given", [".", "ILSVRC", "ILSVRC/Data/CLS-LOC"])
def test_kaggles_tree_may_be_given_at_three_levels(given: str, tmp_path: Path) -> None:
    MINI.write_kaggle(tmp_path)
    source = recognise(tmp_path / given)
    assert source.description == "kaggle-tree: train, val, test (3 classes)"
    assert {split: contents(source.listing(split)) for split in source.splits} == MINI.records


def test_kaggles_lists_say_how_many_images_there_should_be(tmp_path: Path) -> None:
    data = MINI.write_kaggle(tmp_path) / "ILSVRC/Data/CLS-LOC"
    (data / IMAGE).unlink()
    (data / "test/ILSVRC2012_test_00000001.JPEG").unlink()
    source = recognise(tmp_path)
    train, val, test = (source.listing(split) for split in source.splits)
    assert (train.expected, train.shortfall) == (6, "n01440764 has 1 of 2")
    assert (val.expected, val.shortfall) == (4, "")
    assert (test.expected, test.shortfall) == (2, "ILSVRC2012_test_00000001 is missing")


@pytest.mark.parametrize("link", ["ILSVRC", "ILSVRC/Data", "ILSVRC/Data/CLS-LOC"])
def test_a_folder_on_the_way_into_kaggles_tree_may_not_be_a_link(link: str, tmp_path: Path) -> None:
    MINI.write_kaggle(tmp_path / "kaggle")
    (tmp_path / "kaggle" / link).rename(tmp_path / "moved")
    (tmp_path / "kaggle" / link).symlink_to(tmp_path / "moved")
    with pytest.raises(SourceDamaged, match=f"{link}: is a symbolic link"):
        recognise(tmp_path / "kaggle")


def test_a_mapping_of_other_classes_than_the_devkits_is_a_conflict(tmp_path: Path) -> None:
    MINI.write_kaggle(tmp_path)
    MINI.write_devkit(tmp_path)
    write(tmp_path / "LOC_synset_mapping.txt", b"n01440764 tench\n")
    with pytest.raises(LabelConflict, match="n02100735"):
        recognise(tmp_path).listing("train")


def rewrite(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


def shorten(path: Path) -> None:
    os.truncate(path, 3)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [rewrite, shorten, link, fifo, folder, Path.unlink])
def test_a_file_that_changed_since_it_was_listed_is_an_error(
    change: Callable[[Path], None], tree: Path
) -> None:
    listing = recognise(tree).listing("train")
    entry = listing.entries[listing.entries["key"] == b"n01440764/n01440764_7"][0]
    with listing.reader as reader:
        change(tree / IMAGE)
        with pytest.raises(SourceDamaged, match=f"{IMAGE}: changed"):
            reader.read(entry)


def test_a_reader_travels_while_it_is_closed(tree: Path) -> None:
    listing = recognise(tree).listing("val")
    with pickle.loads(pickle.dumps(listing.reader)) as reader:  # noqa: S301 - made here
        assert reader.read(listing.entries[0]) == image("ILSVRC2012_val_00000001")
        assert reader.where(listing.entries[0]) == str(tree / "val/ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(ValueError, match="closed"):
        listing.reader.read(listing.entries[0])


def test_nothing_is_recognised_in_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a known source"):
        recognise(tmp_path)


def litter(folder: Path) -> None:
    for name in (".DS_Store", "cat/.DS_Store", "cat/Thumbs.db", "cat/.hidden", "__MACOSX/cat/._1.jpg"):
        write(folder / name, b"x")


def test_files_of_file_managers_are_left_out_and_counted(tmp_path: Path) -> None:
    write(tmp_path / "cat/1.jpg", b"x")
    litter(tmp_path)

    listing = recognise(tmp_path).listing("train")

    assert [*contents(listing)] == ["cat/1.jpg"]
    assert listing.ignored == {".DS_Store": 2, "Thumbs.db": 1, "other hidden": 1, "__MACOSX": 1}


def test_empty_classes_loose_images_and_litter_alone_are_named_in_one_message(tmp_path: Path) -> None:
    write(tmp_path / "cat/1.jpg", b"x")
    write(tmp_path / "lost.jpg", b"x")
    write(tmp_path / "dog/.DS_Store", b"x")
    (tmp_path / "bird").mkdir()
    with pytest.raises(
        SourceDamaged,
        match=r"lost\.jpg: is not in a class folder; .*; also: .*bird: this class has no image; add some, or "
        r"remove the folder \(the first of 2\)$",
    ):
        recognise(tmp_path).listing("train")


def test_one_class_is_counted_as_one(tmp_path: Path) -> None:
    write(tmp_path / "cat/1.jpg", b"x")

    assert recognise(tmp_path).description == "class-folders: train (1 class)"


def test_a_class_of_links_is_not_said_to_be_empty(tmp_path: Path) -> None:
    write(tmp_path / "images/1.jpg", b"x")
    (tmp_path / "links/cat").mkdir(parents=True)
    (tmp_path / "links/cat/1.jpg").symlink_to(tmp_path / "images/1.jpg")

    with pytest.raises(SourceDamaged, match=r"is a symbolic link, but [^:]* with --follow-symlinks$"):
        convert(tmp_path / "links", tmp_path / "out", workers=0)


def test_images_in_one_folder_are_wrong_usage_that_says_what_would_help(tmp_path: Path) -> None:
    write(tmp_path / "1.jpg", b"x")
    with pytest.raises(
        UsageError, match=r"outside class folders.*sort them into <class>/, or convert a list"
    ):
        recognise(tmp_path)


def test_flat_val_says_all_that_would_help(tmp_path: Path) -> None:
    MINI.write_tree(tmp_path)
    with pytest.raises(
        SourceIncomplete, match=r"sort them into val/<class>/, put .* list of paths and labels"
    ):
        recognise(tmp_path).listing("val")


FOLLOW = SourceOptions(follow_symlinks=True)


@pytest.fixture
def links(tree: Path, tmp_path: Path) -> Path:
    """A subset of the tree, made of links: a split, a class, and an image of another class."""
    subset = tmp_path / "subset"
    (subset / "train/n02119789").mkdir(parents=True)
    (subset / "train/n01440764").symlink_to(tree / "train/n01440764")
    image = "train/n02119789/n02119789_5.JPEG"
    (subset / image).symlink_to(tree / image)
    (subset / "test").symlink_to(tree / "test")
    return subset


def test_a_subset_made_of_links_is_read_by_their_targets(links: Path) -> None:
    source = recognise(links, options=FOLLOW)
    train, test = (source.listing(split) for split in source.splits)

    wanted = {key: data for key, (_, data) in MINI.records["train"].items()}
    keys = {"n01440764/n01440764_10026", "n01440764/n01440764_7", "n02119789/n02119789_5"}
    assert {key: data for key, (_, data) in contents(train).items()} == {key: wanted[key] for key in keys}
    assert contents(test) == MINI.records["test"]
    assert train.options == {"follow_symlinks": True}


def test_an_output_in_a_folder_that_a_link_leads_to_lies_in_the_source(links: Path, tree: Path) -> None:
    assert tree / "train/n01440764" in recognise(links, options=FOLLOW).folders
    assert tree / "test" in recognise(links, options=FOLLOW).folders


def test_links_are_counted_and_the_option_is_named(links: Path, tree: Path) -> None:
    for number in range(3):
        (links / f"train/n0000000{number}").symlink_to(tree)
    (links / "test").unlink()
    with pytest.raises(SourceDamaged, match=r"symbolic link.*--follow-symlinks \(the first of 4\)$"):
        recognise(links).listing("train")


def test_links_to_images_are_counted(tree: Path) -> None:
    for number in range(3):
        (tree / f"train/n01440764/{number}.jpg").symlink_to(tree / IMAGE)
    with pytest.raises(SourceDamaged, match=r"0\.jpg: is a symbolic link.* \(the first of 3\)$"):
        recognise(tree).listing("train")


@pytest.mark.parametrize("target", [".", "..", "self"])
def test_a_loop_of_links_is_an_error_and_ends(target: str, tmp_path: Path) -> None:
    write(tmp_path / "cat/1.jpg", b"x")
    (tmp_path / "cat/self").symlink_to(target)
    with pytest.raises(
        SourceDamaged, match=r"link to a folder that contains it|link whose target cannot be read"
    ):
        recognise(tmp_path, options=FOLLOW).listing("train")


def test_two_links_to_one_folder_are_no_loop(tmp_path: Path) -> None:
    write(tmp_path / "other/1.jpg", b"x")
    for name in ("cat", "dog"):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / name).symlink_to(tmp_path / "other")
    assert [*contents(recognise(tmp_path / "source", options=FOLLOW).listing("train"))] == [
        "cat/1.jpg",
        "dog/1.jpg",
    ]


def test_links_to_nothing_are_counted(tree: Path) -> None:
    for number in range(2):
        (tree / f"train/n01440764/{number}.jpg").symlink_to("nowhere")
    with pytest.raises(SourceDamaged, match=r"target cannot be read .No such file.*the first of 2"):
        recognise(tree, options=FOLLOW).listing("train")


def test_a_target_that_changed_since_it_was_listed_is_an_error(links: Path, tree: Path) -> None:
    listing = recognise(links, options=FOLLOW).listing("train")
    rewrite(tree / IMAGE)
    with pytest.raises(SourceDamaged, match="changed"):
        contents(listing)
