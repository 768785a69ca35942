"""Progress on stderr: a bar on a terminal, lines in a log, or nothing."""

import io
import re
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from shardprep.cli.console.output import CommandBar, PlainProgress
from shardprep.formats.runtime.progress import BAR, Pace, bar_class
from support.terminal_screen import Terminal

PREP = "from shardprep.cli.main import main; main()"


def on_terminal(*words: object, columns: int) -> str:
    """Run ``prep`` on a terminal of so many columns, and return what it wrote there."""
    terminal = Terminal(PREP, *words, columns=columns)
    assert terminal.end() == 0, terminal.written
    return terminal.written


def states(written: str) -> list[str]:
    """The states of a bar that were shown one after the other."""
    return [state for state in written.replace("\n", "\r").split("\r") if "%|" in state]


def convert(archives: Path, output: Path, *words: object) -> list[object]:
    return ["convert", archives, output, "--split", "train", "--shard-size", "200K", "--workers", 1, *words]


TIME_LEFT = r"\| [\d:?]+ left"
COUNTED = r"\| 9/1281167 images, [\d:]+<[\d:?]+"


@pytest.mark.parametrize(
    ("columns", "end"),
    [(40, TIME_LEFT), (60, TIME_LEFT), (80, COUNTED), (99, f"{COUNTED}, 500 images/s, 60 MB/s")],
)
def test_a_bar_keeps_the_time_left_and_leaves_out_what_does_not_fit(columns: int, end: str) -> None:
    options = {"unit": "images", "bar_format": BAR, "ncols": columns, "postfix": "500 images/s, 60 MB/s"}
    with bar_class()(desc="convert train", total=1_281_167, file=io.StringIO(), **options) as bar:
        bar.n = 9

        assert re.search(f"{end}$", str(bar)), str(bar)
        assert len(str(bar)) <= columns


@pytest.mark.slow
def test_a_wide_terminal_has_a_bar_with_all_figures_or_lines_if_asked(archives: Path, tmp_path: Path) -> None:
    shown = states(on_terminal(*convert(archives, tmp_path / "bar", "--shard-size", "1K"), columns=120))
    assert re.search(r"\d images, \d+:\d\d<(\d+:\d\d|\?)(, \d+ images/s(, \d+ MB/s)?)?$", shown[-1])
    written = on_terminal(*convert(archives, tmp_path / "lines", "--progress", "plain"), columns=60)
    assert not states(written)
    assert re.search(r"source: official-tars.*; listing it", written)


@patch("shardprep.formats.runtime.progress.time")
def test_the_rate_of_a_large_shard_is_over_all_the_time_it_took(clock: Mock) -> None:
    clock.monotonic.side_effect = range(151)
    pace = Pace(100, 0)
    for records in [0] * 149 + [50]:
        pace.at(records, 0)
    assert pace.seconds_left() == 150


@patch("shardprep.cli.console.output.FIRST_STATUS_S", 0)
@patch("shardprep.cli.console.output.time")
def test_a_log_gets_a_line_each_interval(clock: Mock, capsys: pytest.CaptureFixture[str]) -> None:
    clock.monotonic.return_value = 0.0
    with PlainProgress().status() as show:
        show("waiting")
        show("at work")
    assert capsys.readouterr().err.endswith(" waiting\n")
    progress = PlainProgress(interval_s=30)
    with progress.task("hash", records=10, size=100):
        progress.at(1, 10)
        clock.monotonic.return_value = 31.0
        progress.at(5, 50)
        progress.at(6, 60)
        progress.at(10, 100)
        progress.shards(2, 2)

    assert re.fullmatch(r".*hash: 50%.*\n.*hash: 100%, 2 of 2 shards\n", capsys.readouterr().err)
    with patch("sys.stderr", Mock(write=Mock(side_effect=OSError(5, "the terminal is gone")))):
        CommandBar().note("which ends nothing")
