"""Commands that are killed."""

import signal
import subprocess
import sys


def killed(seconds: float, *words: object) -> None:
    """Run ``prep`` for so many seconds, at most."""
    command = [sys.executable, "-m", "shardprep.cli", *map(str, words), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
