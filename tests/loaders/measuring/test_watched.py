"""The state of a running loader on a real terminal, which stays in place below what the program prints."""

import signal
from pathlib import Path

import pytest

from shardprep.loaders.measuring.progress_bar import fit_parts, sparkline
from support.sampling import torture_except
from support.terminal_screen import Terminal

FLOW = """
import logging, sys, threading, time
from shardprep.loaders import Flow
from shardprep.loaders.batches.stack import Conversion
from shardprep.loaders.measuring import progress_bar, watched
from shardprep.loaders.remote import RemoteSource, serve
logging.basicConfig(format="log: %(message)s")
progress_bar.WINDOW_S = progress_bar.REDRAWN_S = 0.0
def slow(item):
    time.sleep(0.002)
    return item
flow = Flow.from_iterable(range(40)).map(slow, threads=1)
"""
PRINTS = """
for item in watched(flow, title="train"):
    if item == 10:
        print("a line of stdout")
        print("half a ", end="")
    if item == 15:
        print("line")
        logging.warning("a line")
    if item == 20:
        for inner in watched(Conversion(Flow.from_iterable(range(5)), str), title="validation"):
            print("inner", inner)
with RemoteSource("tcp://127.0.0.1:*") as source:
    threading.Thread(target=serve, args=(Flow.from_iterable(range(5)), source.endpoint), daemon=True).start()
    for item in watched(source):
        print("inner", item)
print("the end")
"""
WAITS = """
for item in watched(flow, title="train"):
    if item == 20:
        sys.stdin.readline()
"""
LOADER = """
import sys
from shardprep.loaders import EvalTransform, Loader
from shardprep.loaders.measuring import progress_bar, watched
progress_bar.WINDOW_S = progress_bar.REDRAWN_S = 0.0
with Loader(sys.argv[1], batch_size=10, transform=EvalTransform(32), workers=1) as train:
    for step, _ in enumerate(watched(train, title="train")):
        if step == 12:
            sys.stdin.readline()
print("the end")
"""
STATE = ("train:", "items/s", "map(slow)")


@pytest.mark.parametrize("columns", torture_except([100, 40, 12], 40))
@pytest.mark.parametrize("disabled", ["", "import os; os.environ['TQDM_DISABLE'] = '1'"], ids=bool)
def test_what_a_program_prints_stays_whole_above_the_state(columns: int, disabled: str) -> None:
    terminal = Terminal(disabled + FLOW + PRINTS, columns=columns)
    assert terminal.end() == 0, terminal.written

    printed = [
        "a line of stdout",
        "half a line",
        "log: a line",
        *(f"inner {n % 5}" for n in range(10)),
        "the end",
    ]
    assert terminal.screen.text.replace("\n", "") == "".join(printed)
    for shown in ("validation", "from 1 sender"):
        assert columns < 20 or (shown in terminal.written) is not bool(disabled)


@pytest.mark.parametrize(("columns", "then"), torture_except([(100, 50), (40, 100), (40, 25)], (100, 50)))
def test_the_state_stays_in_place_in_a_terminal_that_is_resized(columns: int, then: int) -> None:
    terminal = Terminal(FLOW + WAITS, columns=columns)
    terminal.until(r"52%.*map\(slow\) \d+%")
    before = terminal.screen.text.splitlines()
    terminal.resize(then)
    terminal.type("\n")
    code = terminal.end()

    assert len(before) == 3, before
    assert all(part in line for part, line in zip(STATE, before, strict=True))
    assert all(len(line) < columns for line in before)
    assert code == 0
    assert terminal.screen.text == ""


@pytest.mark.torture
def test_a_loader_shows_its_stages_and_its_queue(lmdb_shards: Path) -> None:
    terminal = Terminal(LOADER, lmdb_shards, columns=80)
    terminal.until("13/20.*the step waits .*%")
    shown = terminal.screen.text
    terminal.type("\n")
    code = terminal.end()

    assert "images/s over" in shown
    assert "decode " in shown
    assert " of 9 slots" in shown
    assert (code, terminal.screen.text) == (0, "the end")


def test_ctrl_c_leaves_the_terminal_as_it_was() -> None:
    terminal = Terminal(FLOW + WAITS, columns=80)
    terminal.until(r"52%.*map\(slow\) \d+%")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("KeyboardInterrupt")
    modes = terminal.modes()
    assert terminal.end() == -signal.SIGINT
    assert terminal.screen.text.startswith("Traceback")
    assert not any(part in terminal.screen.text for part in STATE)
    assert modes == terminal.before


def test_what_does_not_fit_gives_way_to_what_matters_more() -> None:
    stages = [(0.94, "  read 6%"), (0.19, "  decode 81%"), (0.9, "  augment 10%")]
    queue = [(0, "queue 9 of 9 slots"), (2, " ▁█"), (1, ", the step waits 25%")]

    whole, least = "read 6%  decode 81%  augment 10%", "queue 9 of 9 slots"
    assert [fit_parts(stages, width) for width in (80, 24, 5)] == [whole, "decode 81%  augment 10%", ""]
    fitting = [f"{least} ▁█, the step waits 25%", f"{least}, the step waits 25%", least, least]
    assert [fit_parts(queue, width) for width in (80, 38, 20, 5)] == fitting
    assert sparkline([0.0, 0.0], 8) == "▁▁"
