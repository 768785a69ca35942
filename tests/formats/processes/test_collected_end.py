"""What ends a dropped object: once, not in the thread that collects it, and at the end of a program."""

import gc
import subprocess
import sys
import threading
from functools import partial

from shardprep.formats.runtime.owned import CollectedEnd


class Dropped:
    """An object in a circle, which only a collection finds."""

    def __init__(self, end: partial[None]) -> None:
        self.itself = self
        self.end = CollectedEnd(self, end)


def test_what_is_collected_ends_in_another_thread_also_under_a_lock_that_its_end_takes() -> None:
    lock, ended = threading.Lock(), threading.Event()
    seen: list[int] = []

    def end() -> None:
        with lock:
            seen.append(threading.get_ident())
            ended.set()

    Dropped(partial(end))
    with lock:
        gc.collect()

    assert ended.wait(30)
    assert seen != [threading.get_ident()]


def test_what_is_closed_ends_at_once_and_once() -> None:
    ends: list[int] = []
    one = Dropped(partial(ends.append, 1))

    one.end()
    one.end()
    del one
    gc.collect()

    assert ends == [1]


def test_at_the_end_of_the_program_it_ends_in_the_main_thread() -> None:
    program = (
        "import threading\n"
        "from shardprep.formats.runtime.owned import CollectedEnd\n"
        "class Owner: pass\n"
        "owner = Owner()\n"
        "end = CollectedEnd(owner, lambda: print(threading.current_thread() is threading.main_thread()))\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
