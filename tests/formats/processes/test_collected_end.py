"""What ends a dropped object: once, not in the thread that collects it, and at the end of a program."""

import subprocess
import sys


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
