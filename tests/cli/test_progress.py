"""Progress on stderr: a bar on a terminal, lines in a log, or nothing."""

import json
import re
import time
from pathlib import Path

import pytest

from shardprep.cli.app import cli
from shardprep.cli.console.progress import BarProgress, Pace, PlainProgress, fitting
from support.datasets import prep, prep_here
from support.terminals import on_terminal, states

LINE = re.compile(
    r"\d\d:\d\d:\d\d convert train: (?P<share>\d+)%, (?P<done>\d+) of (?P<total>\d+) shards?"
    r"(, [\d,]+ images/s, [\d,]+ MB/s)?(, \d+:\d\d left)?"
)
WITH_A_BAR = [
    "sample",
    "convert",
    "verify",
    "repair",
    "publish",
    "fetch",
    "export",
    "bench-disk",
    "bench-loader",
    "serve",
]


def convert(archives: Path, output: Path, *words: object) -> list[object]:
    return ["convert", archives, output, "--split", "train", "--shard-size", "200K", "--workers", 1, *words]


@pytest.mark.slow
def test_a_log_has_the_source_and_a_line_for_shards_at_most_once_a_second(
    archives: Path, tmp_path: Path
) -> None:
    done = prep(*convert(archives, tmp_path / "out"), check=True)

    first, *lines = done.stderr.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d source: official-tars: .*", first)
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), done.stderr
    shards = [int(match["done"]) for match in found if match]
    assert shards == sorted(set(shards))
    times = [line[:8] for line in lines[:-1]]
    assert len(times) == len(set(times))  # the last line, of all shards, may follow at once
    assert found[-1]
    assert (found[-1]["share"], found[-1]["done"]) == ("100", found[-1]["total"])


@pytest.mark.parametrize("words", [["--quiet"], ["--progress", "never"]])
def test_quiet_says_nothing_on_the_way(archives: Path, tmp_path: Path, words: list[str]) -> None:
    done = prep_here(*convert(archives, tmp_path / "out", "--workers", 0, *words))

    assert (done.returncode, done.stderr) == (0, "")
    assert "content_root" in done.stdout


def test_lines_of_progress_are_not_in_the_json(archives: Path, tmp_path: Path) -> None:
    done = prep_here(*convert(archives, tmp_path / "out", "--workers", 0, "--json", "--progress", "plain"))

    assert json.loads(done.stdout)["splits"][0]["split"] == "train"
    assert "shards" in done.stderr


@pytest.mark.parametrize("command", WITH_A_BAR)
def test_every_command_with_a_bar_takes_the_options(command: str) -> None:
    assert {"shown", "quiet"} <= {parameter.name for parameter in cli.commands[command].params}


@pytest.mark.torture
def test_a_bar_at_60_columns_keeps_the_time_left(tmp_path: Path) -> None:
    shown = states(on_terminal("sample", tmp_path / "small", "--train-per-class", 40, columns=60))

    assert len(shown) > 1
    assert all(len(state) < 60 for state in shown)
    assert all(state.endswith(" left") for state in shown[1:])
    assert not [state for state in shown if re.search(r"\d\.\d", state)]


def test_a_title_is_text_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with BarProgress().task("{x} \x1b[31m", records=3, size=3):
        pass

    assert "{x} \\x1b[31m: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_bar_in_a_wide_terminal_has_all_figures(archives: Path, tmp_path: Path) -> None:
    words = convert(archives, tmp_path / "out", "--shard-size", "1K")
    shown = states(on_terminal(*words, columns=120))

    assert shown
    assert re.search(r"\d images(, \d+ images/s, \d+ MB/s)?, (\d+:\d\d|\?) left$", shown[-1])


def test_a_rate_is_shown_once_it_says_more_than_the_start(now: list[float]) -> None:
    pace = Pace(1000, 1_000_000)

    now[0] += 0.9
    pace.at(13, 13_000)
    assert pace.rates() == []
    now[0] += 1.1
    pace.at(200, 200_000)
    assert pace.rates() == ["100 images/s", "0 MB/s"]


@pytest.mark.torture
def test_lines_on_a_terminal_if_asked_for(archives: Path, tmp_path: Path) -> None:
    written = on_terminal(*convert(archives, tmp_path / "out", "--progress", "plain"), columns=60)

    assert not states(written)
    assert "source: official-tars" in written


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the monotonic clock."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_what_fits_has_the_time_left_at_least(now: list[float]) -> None:
    pace = Pace(1_281_167, 140_000_000_000)
    now[0] += 2
    pace.at(640_000, 70_000_000_000)

    texts = [fitting(pace, width) for width in (200, 45, 30, 1)]

    assert [text.count(",") for text in texts] >= [4, 2, 1, 0]
    assert [len(text) for text in texts] == sorted(map(len, texts), reverse=True)
    assert all(text.endswith("left") for text in texts)
    assert texts[-1] == f"{pace.left()} left"


def test_a_log_gets_a_line_each_interval(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress(interval_s=0.02)
    with progress.task("hash", records=10, size=100):
        progress.at(1, 10)
        time.sleep(0.03)
        progress.at(5, 50)
        progress.at(6, 60)

    (line,) = capsys.readouterr().err.splitlines()
    assert "hash: 50%" in line


def test_finished_shards_are_lines_of_a_log_once_a_second(
    now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = PlainProgress()
    with progress.task("convert", records=100, size=1000):
        for done in range(1, 101):
            now[0] += 1 / 16
            progress.at(done, 10 * done)
            progress.shards(done, 100)

    found = re.findall(r"(\d+) of 100 shards", capsys.readouterr().err)
    assert found == ["1", "17", "33", "49", "65", "81", "97", "100"]


def test_the_rate_and_the_time_left_are_unknown_at_first() -> None:
    pace = Pace(10, 0)

    assert (pace.share, pace.rates(), pace.left()) == (0, [], "?")
    pace.at(10, 0)
    assert (pace.share, pace.left()) == (1, "0:00")


def test_a_task_without_records_is_one_of_bytes(now: list[float]) -> None:
    pace = Pace(0, 4_000_000)
    now[0] += 2
    pace.at(0, 1_000_000)

    assert pace.share == 0.25
    assert re.fullmatch(r"1\.0 MB, [\d,]+ MB/s, \d:\d\d left", fitting(pace, 80))


def test_more_than_was_announced_is_all_of_it() -> None:
    pace = Pace(10, 0)
    pace.at(12, 0)

    assert (pace.records, pace.share) == (10, 1)
