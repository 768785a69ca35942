"""``prep bench-disk``: how fast a disk can feed training."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from .options import ANY_PATH, check_place, json_option
from .text import count_of, print_fields, print_json, size

if TYPE_CHECKING:  # the commands that measure nothing do without OpenCV's 50 ms
    from ..loaders.disk import DiskProfile, Measurement, Reads

SHOWN = ("loader's pattern", "random, 1 at once", "random, 16 at once", "small files")  # as bars
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}"


class ExistingPath(click.ParamType[Path]):
    """A path where something is. What must not be looked at is an OSError, as it is no wrong usage."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        try:
            Path(value).stat()
        except (FileNotFoundError, NotADirectoryError):
            self.fail(f"{value} does not exist", param, ctx)
        return Path(value)


class PictureName(click.ParamType[Path]):
    """The name of a PNG, known to be one before anything is measured."""

    name = "picture"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if Path(value).suffix.lower() != ".png":
            self.fail(f"{value} does not end in .png", param, ctx)
        return Path(value)


@click.command("bench-disk")
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
@json_option
@click.option("--plot", type=PictureName(), metavar="FILE.png", help="Also draw the bars as a picture.")
@click.option(
    "--save", type=ANY_PATH, metavar="PROFILE.json", help="Also keep the profile, to compare a loader with."
)
def bench_disk(
    path: Path, seconds: float, record_bytes: int | None, as_json: bool, plot: Path | None, save: Path | None
) -> None:
    """Measure how fast the disk of PATH is read: a dataset's shards, a file, or a folder's disk.

    Cold (the page cache emptied of these files, and checked) and warm; forward and at random places; many
    small files; writing. Needs no special rights and leaves nothing behind.
    """
    from ..loaders.disk import measure_disk
    from ..loaders.disk.plot import save_picture

    for place in (plot, save):
        check_place(place)
    with _bar() as tell:
        profile = measure_disk(path, seconds=seconds, record_bytes=record_bytes, progress=tell)
    if save:
        profile.save(save)
    if plot:
        save_picture(profile, plot)
    if as_json:
        print_json(profile.to_json())
    else:
        _print(profile)


@contextmanager
def _bar() -> Iterator[Callable[[str, float], None]]:
    """Draws what is being measured on stderr while that is a terminal; it is wiped at the end."""
    tqdm.set_lock(threading.RLock())  # its own would be shared between processes, in /dev/shm
    shown = sys.stderr.isatty()
    with tqdm(total=100, disable=not shown, leave=False, bar_format=BAR, dynamic_ncols=True) as bar:

        def tell(title: str, share: float) -> None:
            if shown:
                bar.set_description_str(title, refresh=False)
                bar.update(round(share * 100) - bar.n)
                bar.refresh()

        yield tell


def _print(profile: DiskProfile) -> None:
    from ..loaders.disk.plot import bars, terminal_lines

    files = count_of(profile.files, "file")
    what = "a file made for it" if profile.kind == "folder" else files
    click.echo(
        f"{profile.path}: {what}, {size(profile.bytes)}, on {profile.filesystem or 'an unknown system'}"
    )
    print_fields(_fields(profile))
    click.echo()
    _print_table(profile)
    click.echo()
    few = [bar for bar in bars(profile) if bar.label in SHOWN]
    mark = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    for line in terminal_lines(few, mark=mark):
        click.echo(f"  {line}")
    click.echo(f"\n{sentence(profile)}")


def _fields(profile: DiskProfile) -> dict[str, object]:
    ways = {
        "posix_fadvise": "pages dropped by posix_fadvise, checked by mincore",
        "O_DIRECT": "read with O_DIRECT",
    }
    fields: dict[str, object] = {
        "cold": ways.get(profile.cold_method or "", f"could not be had: {profile.missing.cold}"),
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
    click.echo(f"  {'':22}{'cold':>30}{'warm':>30}")
    for name, reads in rows:
        click.echo(f"  {name:22}{_cell(reads.cold):>30}{_cell(reads.warm):>30}")
    click.echo(f"  {'write and fsync':22}{_cell(profile.writing):>30}")


def _cell(found: Measurement | None) -> str:
    if found is None:
        return "-"
    low, median, high = (f"{rate / 1e6:,.0f}" for rate in (found.low, found.median, found.high))
    return f"{median} ({low}-{high}) x{found.repetitions}"


def sentence(profile: DiskProfile) -> str:
    """What the figures come to."""
    whose = "this dataset's" if profile.kind == "dataset" else "a"
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
    return f"At {whose} mean record size ({mean}) this disk feeds {' and '.join(feeds)}{beats}{even}."
