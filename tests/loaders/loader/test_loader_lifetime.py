"""However a loader ends, nothing hangs and nothing is left; and any transform reaches its workers."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from shardprep.loaders import Loader
from shardprep.loaders.order.receipt import Receipt
from support.loaded import loader_on
from support.process_table import children, descriptors
from support.repository import SUPPORT
from support.sampling import torture_except
from support.scripts import Start, line_of, outcome, scripts
from support.waiting import interrupt, until


def leave_early(loader: Loader) -> None:
    for _ in loader:
        break
    loader.close()


def drop_in_the_middle(loader: Loader) -> None:
    next(iter(loader))


def drop_in_a_cycle(loader: Loader) -> None:
    cycle: list[object] = [loader, iter(loader)]
    cycle.append(cycle)
    next(cycle[1])  # type: ignore[call-overload]


def never_start(loader: Loader) -> None:
    iter(loader)


ENDINGS = [leave_early, drop_in_the_middle, drop_in_a_cycle, never_start]
STARTS = [threading.Thread, SpawnProcess]


@pytest.mark.slow
@pytest.mark.parametrize("ending", torture_except([*ENDINGS, *STARTS], leave_early, never_start, *STARTS))
def test_processes_threads_and_descriptors_return_to_where_they_were(
    lmdb_shards: Path, ending: Callable[[Loader], None] | type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if Ctrl-C arrives while a thread reads ahead or a process is started."""
    with Loader(lmdb_shards, batch_size=4, workers=1) as loader:
        iter(loader)  # multiprocessing keeps a descriptor or two once it has started a process
    del loader
    before = descriptors(), threading.active_count(), children()

    for workers in (0, 2):
        if isinstance(ending, type):
            interrupt(monkeypatch, ending, "start")
            with suppress(KeyboardInterrupt):
                drop_in_the_middle(Loader(lmdb_shards, batch_size=4, workers=workers))
        else:
            ending(loader_on(lmdb_shards, batch_size=4, workers=workers, slots=3))
        gc.collect()

    until(lambda: (descriptors(), threading.active_count(), children()) == before)


def test_ctrl_c_while_a_batch_is_counted_changes_no_state(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loader_on(lmdb_shards, batch_size=4, workers=0) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        interrupt(monkeypatch, Receipt, "add")
        with pytest.raises(KeyboardInterrupt):
            next(batches)

        assert loader.state_dict() == state


PRELUDE = """
import os, signal, sys, time
from shardprep.loaders import EvalTransform, Loader, LocalShuffle, TrainTransform
from support.engine_workers import sleep_for_ever
from support.loader_workers import *
path = os.environ["SHARDS"]
"""


@pytest.fixture
def start(lmdb_shards: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a script with a TensorFlow module that raises on import."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    (stubs / "tensorflow.py").write_text(
        "import os\nif os.environ.get('STRICT'): raise ImportError('imported')\n"
    )
    folders = f"{SUPPORT}{os.pathsep}{stubs}"
    with scripts(tmp_path, PRELUDE, SHARDS=str(lmdb_shards), PYTHONPATH=folders) as start_script:
        yield start_script


@pytest.mark.torture
def test_a_script_needs_no_main_guard_and_its_workers_no_tensorflow(start: Start) -> None:
    script = """
import tensorflow
os.environ["STRICT"] = "1"
options = dict(batch_size=50, shuffle=LocalShuffle(50), workers=2)
with Loader(path, transform=TrainTransform(8), **options) as loader:
    assert sum(1 for batch in loader) == 4
with Loader(path, transform=Imported(("tensorflow", "scipy", "h5py")), **options) as loader:
    assert [imported.any() for imported, labels in loader] == [False] * 4
"""
    assert outcome(start(script)) == (0, "")


@pytest.mark.slow
def test_what_is_written_to_closed_streams_gets_into_no_batch(start: Start) -> None:
    script = """
from functools import partial
os.closerange(0, 3)
loud = Tagging({"": partial(os.write, 1, b"loud")})
with Loader(path, batch_size=4, transform=loud, workers=2) as loader:
    os._exit(42 if all((seen == labels).all() for _, _, seen, labels in loader) else 1)
"""
    assert outcome(start(script))[0] == 42


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "ending"),
    torture_except(
        [
            (0, ""),
            (2, ""),
            (2, "sys.exit()"),
            (2, "del loader"),
            (2, "cycle = [batches]; cycle.append(cycle)"),
            (0, "loader.close()"),
        ],
        (2, "sys.exit()"),
    ),
)
def test_an_interpreter_ends_quietly_within_an_epoch(start: Start, ending: str, workers: int) -> None:
    script = f"""
report_late_joins()
loader = Loader(path, batch_size=4, transform=Tagging({{"": nap}}), shuffle=LocalShuffle(50), workers={workers})
batches = iter(loader)
held = next(batches)
{ending}
"""
    assert outcome(start(script)) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("moment", torture_except(["starting", "waiting"], "waiting"))
def test_ctrl_c_ends_a_loop_quietly(start: Start, moment: str) -> None:
    process = start(f"""
loader = Loader(path, batch_size=4, transform=Tagging({{"": sleep_for_ever}}), shuffle=LocalShuffle(50), workers=2)
if {moment == "starting"}:
    print("now", flush=True)
else:
    import threading
    threading.Timer(1, print, ["now"], {{"flush": True}}).start()
for batch in loader:
    pass
""")
    assert line_of(process) == "now"

    os.killpg(process.pid, signal.SIGINT)
    code, said = outcome(process)

    assert code == -signal.SIGINT
    assert said.count("Traceback") == 1
    assert said.endswith("KeyboardInterrupt\n")


def iterate_until_interrupted(loader: Loader, after_s: float) -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, after_s)
    while signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        for _ in loader:
            pass
    time.sleep(1)  # another thread may have received the signal


@pytest.mark.slow
def test_no_interruption_is_lost_and_the_loader_goes_on(
    lmdb_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", print)  # what Python ignores is lost, and no error of pytest
    before = signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    try:
        with loader_on(lmdb_shards, batch_size=2, workers=1, read_ahead=0) as loader:
            for number in range(150):
                with pytest.raises(KeyboardInterrupt):
                    iterate_until_interrupted(loader, 0.002 + number * 1e-5)
                loader.load_state_dict(loader.state_dict())
            epoch = loader.epoch
            for _ in loader:
                pass
            loader.receipt().check(204)
            assert loader.receipt().epoch == epoch
    finally:
        signal.signal(signal.SIGVTALRM, before)


CELL = """
import sys
import numpy as np
from shardprep import Loader
SCALE = 3
class Brightness:
    def __init__(self, by): self.by = by
def brightness(record, rng):
    return np.frombuffer(record.image, np.uint8)[:4] * np.float32(SCALE) + Brightness(rng.random()).by
class Dark(Exception): pass
def dark(record, rng): raise Dark(record.key)
print("begun")
found = []
for workers in (0, 2):
    with Loader(sys.argv[1], batch_size=50, transform=brightness, workers=workers) as loader:
        found.append([images for images, labels in loader])

print(len(found[0]), np.array_equal(*found))
try: next(iter(Loader(sys.argv[1], batch_size=50, transform=dark, workers=1)))
except Dark as error: print("dynamic" in error.__notes__[0])
"""


def run(how: str, path: Path, folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program as a notebook does (typed, in a main module without a file), or as a script."""
    (folder / "script.py").write_text(program)
    typed = f"exec({program!r})\n"
    arguments = {
        "a script": ["script.py", path],
        "standard input": ["-", path],
        "an interactive session": ["-i", "-q", "-c", "", path],
    }[how]
    if how == "an interactive session":
        program = "import sys; sys.argv[1:] = [" + repr(str(path)) + "]\n" + typed
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        input=program,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
    )


@pytest.mark.torture
@pytest.mark.parametrize("how", ["a script", "standard input", "an interactive session"])
def test_a_function_of_a_notebooks_cell_goes_to_workers(lmdb_shards: Path, tmp_path: Path, how: str) -> None:
    """So do its errors come back, and a script needs no main guard: no worker runs it again."""
    done = run(how, lmdb_shards, tmp_path, CELL)

    assert "begun\n4 True\nFalse\n" in done.stdout
    assert done.stdout.count("begun") == 1
    assert "Error" not in done.stderr


@pytest.mark.slow
def test_without_cloudpickle_a_path_may_have_the_main_modules_name_and_its_functions_are_refused_with_advice(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    (tmp_path / "cloudpickle.py").write_text("raise ImportError('not installed')\n")
    (tmp_path / "of __main__").symlink_to(lmdb_shards)
    program = "import sys, shardprep as s; print(len(list(s.Loader(sys.argv[1], batch_size=50, workers=1))))"
    assert run("standard input", tmp_path / "of __main__", tmp_path, program).stdout == "4\n"

    done = run("standard input", lmdb_shards, tmp_path, CELL)

    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert "defined in a notebook or on standard input" in said
    assert "pip install 'shardprep[cloudpickle]'" in said
