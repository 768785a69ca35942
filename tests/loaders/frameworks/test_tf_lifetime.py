"""The end of programs with an open input: in any state, at once, with a correct exit code, nothing left."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.repository import SUPPORT
from support.sampling import torture_except
from support.scripts import Start, line_of, outcome, scripts

PRELUDE = """
import os, signal, sys, threading, time
from support.tf_devices import tf
import numpy as np
from support.loader_workers import Tagging, nap, report_late_joins
from shardprep.loaders import Loader, LocalShuffle
from shardprep.loaders.tf_inputs import *

report_late_joins()

def loader(**options):
    options = {"batch_size": 4, "transform": Tagging(), "shuffle": LocalShuffle(50), "workers": 1} | options
    return Loader(os.environ["SHARDS"], **options)

def endless(seconds=0.0):
    while True:
        time.sleep(seconds)
        yield np.zeros((4, 3), np.float32), np.zeros((4, 1), np.float32)

def full(each):
    while each.stats().level < each.stats().capacity:
        time.sleep(0.01)

def interrupt(seconds=0.5, number=signal.SIGINT):
    threading.Timer(seconds, os.kill, [os.getpid(), number]).start()
"""


@pytest.fixture
def start(lmdb_shards: Path, tmp_path: Path) -> Iterator[Start]:
    with scripts(tmp_path, PRELUDE, SHARDS=str(lmdb_shards), PYTHONPATH=SUPPORT) as start_script:
        yield start_script


STATES = {
    "feeder waits for room": "each = QueueInput(loader()); it = iter(each); next(it); full(each)",
    "stage waits for room": "each = StagingInput(QueueInput(loader()), depth=2); it = iter(each); next(it); full(each)",
    "source is slow": """
each = QueueInput(lambda: endless(0.3), signature=(tf.TensorSpec([4, 3]), tf.TensorSpec([4, 1])))
it = iter(each)
""",
    "dataset of a queue": "each = QueueInput(loader()); it = iter(each.to_dataset(prefetch=1)); next(it)",
    "dataset of a loader": "each = DatasetInput(to_dataset(loader(), prefetch=3)); it = iter(each); next(it)",
    "graph": "each = StagingInput(QueueInput(loader()), depth=2); tf.function(lambda: each.dequeue())()",
    "graph over a dataset": "each = DatasetInput(to_dataset(loader())); tf.function(lambda: each.dequeue())()",
    "replicas": """
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
each = StagingInput(QueueInput(loader()), strategy=strategy, depth=2)
tf.function(lambda: strategy.run(each.dequeue))()
""",
    "session": """
tf.compat.v1.disable_eager_execution()
each = StagingInput(QueueInput(loader()))
batch = each.dequeue()
session = tf.compat.v1.Session()
each.start(session)
session.run(batch)
""",
}
QUICK = ["feeder waits for room", "dataset of a queue"]
OTHERS = [state for state in STATES if state not in QUICK]
PAIRS = [QUICK, *(OTHERS[n : n + 2] for n in range(0, len(OTHERS), 2))]


def in_pairs(pairs: list[list[str]]) -> pytest.MarkDecorator:
    """Give a test two states at a time, to run at once: importing TensorFlow takes most of the time."""
    return pytest.mark.parametrize("states", pairs, ids=", ".join)


@in_pairs(torture_except(PAIRS, QUICK))
def test_an_interpreter_ends_quietly(start: Start, states: list[str]) -> None:
    processes = [start(STATES[state]) for state in states]
    assert [outcome(process) for process in processes] == [(0, "")] * len(states)


@pytest.mark.torture
@in_pairs(PAIRS)
def test_a_terminated_program_leaves_nothing(start: Start, states: list[str]) -> None:
    for process in [
        start(STATES[state] + "\nprint('now', flush=True)\ntime.sleep(3600)") for state in states
    ]:
        assert line_of(process) == "now"
        process.terminate()
        assert outcome(process)[0] == -signal.SIGTERM


@pytest.mark.torture
def test_sys_exit_within_fit_is_its_exit_code(start: Start) -> None:
    script = """
class Leave(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, step, logs=None):
        if step == 3:
            sys.exit(5)

made = tf.keras.Sequential([tf.keras.layers.Dense(1)])
made.compile("sgd", "mse")
each = QueueInput(lambda: endless())
made.fit(each.to_dataset(), verbose=0, shuffle=False, callbacks=[Leave()])
"""
    assert outcome(start(script)) == (5, "")


def test_a_program_ends_with_the_error_of_a_dataset(start: Start) -> None:
    script = """
def failing():
    yield tuple(np.zeros((4, 1), np.float32) for _ in range(300))
    raise ValueError("damaged")

for batch in to_dataset(failing, prefetch=1):
    pass
"""
    for status, said in map(outcome, [start(script) for _ in range(2)]):
        assert status == 1
        assert "ValueError: damaged" in said


WAITING = """
for batch in StagingInput(QueueInput(lambda: endless({}), signature=tf.TensorSpec([4, 3]))):
    pass
"""
LOOPS = {
    "waiting": WAITING.format(2),
    "waiting for ever": WAITING.format(3600),
    "dequeuing": """
each = QueueInput(lambda: endless(0.001))
while True:
    each.dequeue()
""",
}


@pytest.mark.torture
@pytest.mark.parametrize("loop", LOOPS)
def test_ctrl_c_is_heard(start: Start, loop: str) -> None:
    code, said = outcome(start("interrupt()\n" + LOOPS[loop]))

    assert code == -signal.SIGINT
    assert said.count("Traceback") == 1
    assert said.endswith("KeyboardInterrupt\n")


@pytest.mark.torture
def test_ctrl_c_leaves_an_input_that_goes_on(start: Start) -> None:
    script = """
made = loader(with_numbers=True, drop_last=False, transform=Tagging({"": nap}))
with StagingInput(QueueInput(made)) as each:
    interrupt()
    try:
        while True:
            for batch in each:
                pass
    except KeyboardInterrupt:
        state = each.state_dict()
    each.load_state_dict(state)
    for batch in each:
        pass
    made.receipt().check(204)
made.close()
"""
    assert outcome(start(script)) == (0, "")
