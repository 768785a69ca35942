"""The state of a running loader on a real terminal, which stays in place below what the program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardprep.loaders.measuring.status import queue_line
from support.sampling import torture_except
from support.terminal_screen import Terminal

FLOW = """
import logging, sys, time
from shardprep.loaders import Flow
from shardprep.loaders.measuring import progress_bar, watched
from shardprep.loaders.measuring import status

logging.basicConfig(format="log: %(message)s")
progress_bar.WINDOW_S = status.REDRAWN_S = 0.0

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
        for inner in watched(Flow.from_iterable(range(5)), title="validation"):
            print("inner", inner)
print("the end")
"""
LOADER = """
import sys
from shardprep.loaders import EvalTransform, Loader
from shardprep.loaders.measuring import progress_bar, watched
from shardprep.loaders.measuring import status

progress_bar.WINDOW_S = status.REDRAWN_S = 0.0
with Loader(sys.argv[1], batch_size=10, transform=EvalTransform(32), workers=1) as train:
    for step, _ in enumerate(watched(train, title="train")):
        if step == 12:
            sys.stdin.readline()
print("the end")
"""


@pytest.mark.parametrize("columns", torture_except([100, 40, 12], 40))
def test_what_a_program_prints_stays_whole_above_the_state(columns: int) -> None:
    terminal = Terminal(FLOW + PRINTS, columns=columns)
    code = terminal.end()

    printed = ["a line of stdout", "half a line", "log: a line", *(f"inner {n}" for n in range(5)), "the end"]
    assert code == 0, terminal.written
    assert terminal.screen.text.replace("\n", "") == "".join(printed)
    assert "validation" in terminal.written or columns < 20


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


def test_a_queue_is_shown_as_far_as_there_is_room() -> None:
    assert queue_line([0, 9], 9, 0.25, 80, sparkline=True) == "queue 9 of 9 slots ▁█, the step waits 25%"
    assert queue_line([0, 9], 9, 0.25, 38, sparkline=False) == "queue 9 of 9 slots, the step waits 25%"
    assert queue_line([0, 9], 9, 0.25, 20, sparkline=True) == "queue 9 of 9 slots"
