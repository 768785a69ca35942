"""``prep sample``: make a miniature ILSVRC12 in its official packaging."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from shardprep.cli.console.options import ANY_PATH, examples, json_option, progress_option
from shardprep.cli.console.output import print_fields, print_json, say
from shardprep.cli.console.progress import Form, progress_in
from shardprep.formats import make_sample
from shardprep.formats.system.sizes import count_of, size


@click.command(
    short_help="Make a miniature ILSVRC12 in its official packaging.",
    epilog=examples(
        "sample archives",
        "sample small --classes 4 --train-per-class 6 --val 10 --test 3",
    ),
)
@click.argument("output", type=ANY_PATH)
@click.option("--classes", default=10, show_default=True, help="Classes, 1 to 1000.")
@click.option("--train-per-class", default=30, show_default=True, help="Training images of each class.")
@click.option("--val", default=100, show_default=True, help="Validation images.")
@click.option("--test", default=20, show_default=True, help="Test images, which have no labels.")
@click.option("--seed", default=0, show_default=True, help="Another seed gives other classes and crops.")
@progress_option
@json_option
def sample(
    output: Path,
    classes: int,
    train_per_class: int,
    val: int,
    test: int,
    seed: int,
    form: Form,
    as_json: bool,
) -> None:
    """Make a miniature ILSVRC12 in the folder OUTPUT, packed as the real one is.

    Crops of 25 free photographs, with the real set's oddities: a PNG named .JPEG, CMYK, grayscale,
    progressive and tiny images, EXIF orientation. To try everything on before the 148 GB.
    """
    made = make_sample(
        output,
        classes=classes,
        train_per_class=train_per_class,
        val=val,
        test=test,
        seed=seed,
        progress=progress_in(form),
    )
    if as_json:
        print_json({"output": str(output), **asdict(made)})
        return
    images = ", ".join(f"{count:,} {split}" for split, count in made.images.items())
    say(f"{output}: {count_of(len(made.wnids), 'class')}, {images} images")
    print_fields({file.name: size(file.size) for file in made.files})
