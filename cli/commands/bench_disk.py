"""``prep bench-disk``: how fast a disk can feed training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from shardprep.cli.console.options import ANY_PATH, check_writable, examples, json_option, progress_option
from shardprep.cli.console.output import print_fields, print_json, say
from shardprep.cli.console.progress import Form
from shardprep.cli.console.status import SHARE, StatusLine
from shardprep.formats.system.sizes import count_of, size

if TYPE_CHECKING:  # start-up time: OpenCV takes 50 ms
    from shardprep.loaders.measuring.disk import DiskProfile, Measurement, Reads

SHOWN = ("loader's pattern", "random, 1 at once", "random, 16 at once", "small files")  # rows with a bar


class ExistingPath(click.ParamType[Path]):
    """An existing path. A path without permission is an OSError, because that is not wrong usage."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = ANY_PATH.convert(value, param, ctx)
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self.fail(f"{value} does not exist", param, ctx)
        return path

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


class PictureName(click.ParamType[Path]):
    """The name of a PNG file, checked before anything is measured."""

    name = "picture"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = ANY_PATH.convert(value, param, ctx)
        if path.suffix.lower() != ".png":
            self.fail(f"{value} does not end in .png", param, ctx)
        return path


@click.command(
    "bench-disk",
    short_help="Measure how fast a disk can feed training.",
    epilog=examples(
        "bench-disk shards/train",
        "bench-disk shards/train --seconds 60 --save disk.json --plot disk.png",
    ),
)
@click.argument("path", type=ExistingPath())
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=20,
    show_default=True,
    help="How long to measure, in all.",
)
@click.option(
    "--record-bytes",
    type=click.IntRange(1, 16 << 20),
    help="Size of a record.  [default: the dataset's mean, or 110000]",
)
@progress_option
@json_option
@click.option("--plot", type=PictureName(), metavar="FILE.png", help="Also draw the bars as a picture.")
@click.option(
    "--save", type=ANY_PATH, metavar="PROFILE.json", help="Also keep the profile, to compare a loader with."
)
def bench_disk(
    path: Path,
    seconds: float,
    record_bytes: int | None,
    form: Form,
    as_json: bool,
    plot: Path | None,
    save: Path | None,
) -> None:
    """Measure how fast the disk of PATH is read: a dataset's shards, a file, or a folder's disk.

    Cold (the page cache emptied of these files, and checked) and warm; forward and at random places; many
    small files; writing. Needs no special rights and leaves nothing behind.
    """
    from shardprep.loaders.measuring.disk import measure_disk  # start-up time: OpenCV
    from shardprep.loaders.measuring.disk.plot import save_picture

    for place in (plot, save):
        check_writable(place)
    with StatusLine(form, SHARE) as status:
        profile = measure_disk(path, seconds=seconds, record_bytes=record_bytes, progress=status.show)
    if save:
        profile.save(save)
    if plot:
        save_picture(profile, plot)
    if as_json:
        print_json(profile.to_json())
    else:
        _print(profile)


def _print(profile: DiskProfile) -> None:
    from shardprep.loaders.measuring.disk.plot import bars, terminal_lines  # start-up time: OpenCV

    files = count_of(profile.files, "file")
    what = "a file made for it" if profile.kind == "folder" else files
    say(f"{profile.path}: {what}, {size(profile.bytes)}, on {profile.filesystem or 'an unknown system'}")
    print_fields(_fields(profile))
    say()
    _print_table(profile)
    say()
    few = [bar for bar in bars(profile) if bar.label in SHOWN]
    mark = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    for line in terminal_lines(few, mark=mark):
        say(f"  {line}")
    say()
    say(sentence(profile))


def _fields(profile: DiskProfile) -> dict[str, object]:
    methods = {
        "posix_fadvise": "pages dropped by posix_fadvise, checked by mincore",
        "O_DIRECT": "read with O_DIRECT",
    }
    fields: dict[str, object] = {
        "cold": methods.get(profile.cold_method or "", f"could not be had: {profile.missing.cold}"),
        "records": f"{profile.record_bytes:,} bytes",
        "measured": f"{profile.seconds:.1f} s; MB/s, medians (quartiles) of passes in turns",
    }
    for name, why in (("small files", profile.missing.small_files), ("writing", profile.missing.writing)):
        if why:
            fields[name] = f"not measured: {why}"
    return fields | {f"note {number}": text for number, text in enumerate(profile.remarks, 1)}


def _print_table(profile: DiskProfile) -> None:
    rows: list[tuple[str, Reads]] = [("loader's pattern", profile.stream)]
    rows += [(f"sequential, {r.block_name}", r) for r in profile.sequential]
    rows += [(f"random, {r.queue_depth} at once", r) for r in profile.random]
    if small := profile.small_files:
        rows += [(f"{small.count} small files", small.files), ("the same in a shard", small.shard)]
    say(f"  {'':22}{'cold':>30}{'warm':>30}")
    for name, reads in rows:
        say(f"  {name:22}{_cell(reads.cold):>30}{_cell(reads.warm):>30}")
    say(f"  {'write and fsync':22}{_cell(profile.writing):>30}")


def _cell(found: Measurement | None) -> str:
    if found is None:
        return "-"
    low, median, high = (f"{rate / 1e6:,.0f}" for rate in (found.low, found.median, found.high))
    return f"{median} ({low}-{high}) x{found.repetitions}"


def sentence(profile: DiskProfile) -> str:
    """Return the result in one sentence."""
    which = "this dataset's" if profile.kind == "dataset" else "a"
    images, faster = profile.images_per_second, profile.sequential_over_random
    cold, warm = images["cold"], images["warm"]
    feeds = [f"{rate:,.0f} {word}" for rate, word in ((cold, "images/s cold"), (warm, "warm")) if rate]
    if cold is None:
        feeds = (
            [f"{warm:,.0f} images/s warm (cold could not be had)"] if warm else ["nothing that was measured"]
        )
    ratio = faster["cold"] or faster["warm"]
    beats = (
        f"; sequential reading beats random by {ratio:.1f}\N{MULTIPLICATION SIGN}"
        if ratio and ratio >= 1.05
        else ""
    )
    even = "; sequential reading is no faster than random" if ratio and ratio < 1.05 else ""
    mean = size(profile.record_bytes).replace(".0 ", " ")
    return f"At {which} mean record size ({mean}) this disk feeds {' and '.join(feeds)}{beats}{even}."
