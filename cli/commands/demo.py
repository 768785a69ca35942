"""``prep demo`` and ``prep sample``: data to try the other commands on."""

from __future__ import annotations

import sys
import tempfile
from contextlib import chdir, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from shardprep.cli.console import options
from shardprep.cli.console.options import command
from shardprep.cli.console.output import Output, fields, say
from shardprep.formats.runtime.progress import count_of, format_size
from shardprep.formats.sources.sample import make_sample

STEPS = (
    "sample archives",
    "convert archives lmdb",
    "convert archives hdf5 --format hdf5",
    "verify lmdb/train --level decode",
    "verify hdf5/val --level records",
    "inspect lmdb/train",
)


@command("Show every step on a miniature dataset, in seconds.", "demo", "demo tryout")
@click.argument("folder", type=options.ANY_PATH, required=False)
@click.pass_context
def demo(ctx: click.Context, folder: Path | None) -> None:
    """Make a miniature ILSVRC12, convert it, verify it, inspect it and load it, showing each step.

    Works in FOLDER, which must be empty or new, and keeps it; without FOLDER in a temporary folder
    that is removed at the end.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise click.UsageError(f"{folder} is not empty; choose another folder")
    place = tempfile.TemporaryDirectory(prefix="prep-demo-") if folder is None else nullcontext(str(folder))
    with place as path:
        click.secho(f"$ cd {path}", bold=True)
        with chdir(path):
            for step in STEPS:
                arguments = step.split(" ")
                sys.argv = ["prep", *arguments]  # for provenance.json
                click.secho(f"\n$ prep {step}", bold=True)
                prep = ctx.find_root().command
                with prep.make_context("prep", arguments) as context:
                    code = prep.invoke(context)
                if code:
                    ctx.exit(code)
            _load_epoch(Path("lmdb/train"))
    removed = "the folder is removed again (run prep demo FOLDER to keep it)"
    say()
    say(f"Done; {f'everything is in {folder}' if folder else removed}. To do the same with your own data:")
    say("  prep convert ARCHIVES SHARDS")


def _load_epoch(dataset: Path) -> None:
    from shardprep.loaders.loader.loader import Loader
    from shardprep.loaders.order.epoch import LocalShuffle
    from shardprep.loaders.transforms.transforms import TrainTransform  # start-up time: OpenCV

    click.secho(f"\n# one epoch of {dataset} through shardprep.loaders.Loader, two workers", bold=True)
    with Loader(
        dataset,
        batch_size=64,
        transform=TrainTransform(64),
        shuffle=LocalShuffle(100),
        workers=2,
        rank=0,
        world_size=1,
        drop_last=False,
    ) as loader:
        for images, labels in loader:
            say(f"images {images.dtype} {list(images.shape)}, labels {labels.dtype} {list(labels.shape)}")
        receipt = loader.receipt()
        receipt.check(len(loader.dataset))
        say(f"receipt: {receipt.count} of {len(loader.dataset)} records, each exactly once")


@command(
    "Make a miniature ILSVRC12 in its official packaging.",
    "sample archives",
    "sample small --classes 4 --train-per-class 6 --val 10 --test 3",
)
@click.argument("output", type=options.ANY_PATH)
@click.option("--classes", default=10, help="Classes, 1 to 1000.")
@click.option("--train-per-class", default=30, help="Training images of each class.")
@click.option("--val", default=100, help="Validation images.")
@click.option("--test", default=20, help="Test images (unlabelled).")
@click.option("--seed", default=0, help="Another seed gives other classes and crops.")
@options.output
def sample(output: Path, **chosen: Any) -> Output:
    """Make a miniature ILSVRC12 in the folder OUTPUT, packed like the real one.

    Its images are crops of 25 free photographs, with the real set's oddities: a PNG named .JPEG, CMYK,
    grayscale, progressive and tiny images, EXIF orientation. Try commands on it before the real 148 GB.
    """
    made = make_sample(output, **chosen)
    images = ", ".join(f"{count:,} {split}" for split, count in made.images.items())
    summary = f"{output}: {count_of(len(made.wnids), 'class')}, {images} images"
    lines = [summary, *fields({file.name: format_size(file.size) for file in made.files})]
    return Output({"output": str(output), **asdict(made)}, lines)
