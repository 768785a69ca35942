"""Making, comparing and damaging datasets in tests."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, chdir, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from signal import default_int_handler

from shardprep.cli.app import run
from shardprep.formats import PlanOptions, convert
from shardprep.formats.runtime.progress import NoProgress
from shardprep.formats.shards.manifest import Manifest


def converted(
    source: Path, output: Path, *, split: str = "train", workers: int = 0, **options: object
) -> Manifest:
    """Convert one split in this process, or in workers; return its manifest."""
    plan_options = PlanOptions(**{"shard_size": 60_000, **options})  # type: ignore[arg-type]
    (done,) = convert(source, output, split=split, plan_options=plan_options, workers=workers)
    return done.manifest


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its SHA-256, except the provenance, which contains the time."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "provenance.json"
    }


def writable(path: Path) -> Path:
    """Make a published file writable, to damage it."""
    path.chmod(0o644)
    return path


def open_files(folder: Path) -> int:
    """The number of files of the folder that this process has open."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(str(target).startswith(str(folder)) for target in links)


class StopAfter(NoProgress):
    """Progress that interrupts the work, but not its listing, or calls ``then``, after some shards."""

    def __init__(self, shards: int, then: Callable[[], object] | None = None) -> None:
        self.left, self.then = shards, then or partial(default_int_handler, 2, None)

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        self.counted = not title.startswith("list ")
        return super().task(title, records=records, size=size)

    def at(self, records: int, size: int) -> None:
        self.left -= self.counted
        if not self.left:
            self.then()


def flip(path: Path, position: int | None = None, bit: int = 0) -> None:
    """Flip one bit, in the middle by default, so that the byte always changes."""
    position = path.stat().st_size // 2 if position is None else position
    with writable(path).open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def unpack(archives: Path, root: Path) -> Path:
    """The archives as an extracted tree: train/<wnid>, val flat, test flat, and the devkit as it is."""
    for split in ("train", "val", "test"):
        with tarfile.open(archives / f"ILSVRC2012_img_{split}.tar") as outer:
            for member in filter(tarfile.TarInfo.isfile, outer):
                target = root / split / Path(member.name).name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(outer.extractfile(member).read())  # type: ignore[union-attr]
        for inner in (root / split).glob("*.tar"):
            shutil.unpack_archive(inner, inner.with_suffix(""), filter="data")
            inner.unlink()
    shutil.copy(archives / "ILSVRC2012_devkit_t12.tar.gz", root)
    return root


def prep(
    *words: object, check: bool = False, prefix: Iterable[str] = (), **kwargs: object
) -> subprocess.CompletedProcess[str]:
    """Run ``prep`` in a new process, as a user does."""
    command = [*prefix, sys.executable, "-m", "shardprep", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, **kwargs)  # type: ignore[call-overload]
    if check and done.returncode:
        raise AssertionError(done.stderr)
    return done  # type: ignore[no-any-return]


def prep_here(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``prep`` in this process, which is faster, for options that it refuses at once."""
    said, complained = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(complained), chdir(cwd or "."):
        code = run([*map(str, words)])
    return subprocess.CompletedProcess(words, code, said.getvalue(), complained.getvalue())


def is_root() -> bool:
    return os.geteuid() == 0
