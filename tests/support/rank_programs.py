"""Programs that train in several processes, each of which reads an epoch of a loader."""

import json
import os
from pathlib import Path
from typing import Any

from shardprep.loaders import Loader, Receipt
from support.loaded import epoch_of, loader_on, numbers_in
from support.ports import free_port
from support.repository import SUPPORT
from support.scripts import piped

TIMEOUT_S = 240

Told = tuple[list[int], dict[str, Any]]


def tell(numbers: list[int], loader: Loader) -> None:
    """Say which records came, and the receipt, on a line of its own: frameworks write to the same output."""
    os.write(1, b"\ntold " + json.dumps([numbers, loader.receipt().to_json()]).encode() + b"\n")


def tell_epoch(path: str) -> None:
    """Read and tell the epoch of a loader that is given no rank."""
    with loader_on(Path(path)) as loader:
        tell(numbers_in(epoch_of(loader)), loader)


def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


def told_by(folder: Path, program: str, *arguments: tuple[object, ...]) -> list[Told]:
    """Run a program with each of the arguments, all at once; return what they told."""
    (folder / "train.py").write_text(program)
    started = [piped(folder / "train.py", *each, PYTHONPATH=SUPPORT) for each in arguments]
    try:
        said = [process.communicate(timeout=TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0] * len(started), said
    lines = "".join(out for out, _ in said).splitlines()
    return [json.loads(line.removeprefix("told ")) for line in lines if line.startswith("told ")]


def assert_shared(told: list[Told], *, ranks: int) -> None:
    """Check that so many ranks together delivered the 204 records, each once."""
    assert len(told) == ranks
    assert sorted(number for numbers, _ in told for number in numbers) == list(range(204))
    Receipt.merge(Receipt.from_json(receipt) for _, receipt in told).check(204)
