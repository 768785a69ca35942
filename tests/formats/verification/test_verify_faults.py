"""Verification with system errors and signals: no errno is damage, and the exit code is always right."""

from pathlib import Path

import pytest

from support.datasets import converted, flip, prep
from support.sampling import needs_strace, torture_except


@pytest.fixture(scope="module")
def intact(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("faults") / "val"
    converted(archives, output, split="val", shard_size=400_000, container="hdf5")
    return output


def verified(path: Path, fault: str, dataset: Path, level: str = "full") -> tuple[int, list[str], str]:
    """The exit code, the output and stderr when system calls on a path fail."""
    trace = ["strace", "-f", "-qqq", "-o/dev/null", f"-P{path}", f"-einject={fault}"]
    done = prep("verify", dataset, "--level", level, "--workers", 1, prefix=trace)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.slow
@needs_strace
def test_a_manifest_that_the_disk_does_not_give_is_named(dataset: Path) -> None:
    code, _, complained = verified(manifest := dataset / "manifest.json", "read:error=EIO", dataset)

    assert (code, complained) == (3, f"prep: {manifest}: Input/output error: see dmesg, and run it again\n")


@pytest.mark.slow
@needs_strace
@pytest.mark.parametrize(
    ("name", "fault", "reason"),
    torture_except(
        [
            ("index.npy", "preadv,preadv2:error=EIO", "Input/output error"),
            ("boxes.npy", "openat:error=ENOMEM", "Cannot allocate memory"),
            ("shard-00000.h5", "newfstatat:error=ESTALE", "Stale file handle"),
            ("shard-00000.h5", "openat:error=EMFILE", "Too many open files"),
            (".", "getdents64:error=EIO", "Input/output error"),
        ],
        ("index.npy", "preadv,preadv2:error=EIO", "Input/output error"),
    ),
)
def test_what_the_system_does_not_give_is_unchecked_and_the_rest_is_checked(
    dataset: Path, name: str, fault: str, reason: str
) -> None:
    other = dataset / ("provenance.json" if name == "." else "notes.txt")
    other.write_text("")

    code, said, complained = verified(dataset / name, fault, dataset)

    assert f"unchecked: {name}: {reason}" in said
    assert (code, complained) == (3 if name == "." else 1, "")
    assert (f"damaged: {other.name}: does not belong to the dataset" in said) == (name != ".")


@pytest.mark.torture
@needs_strace
def test_a_finding_stays_when_the_disk_fails_afterwards(dataset: Path) -> None:
    shard = dataset / "shard-00000.h5"
    flip(shard)

    code, said, _ = verified(shard, "pread64:error=EIO", dataset, "records")

    assert (code, said[0]) == (1, f"damaged: {shard.name}: its SHA-256 differs from the manifest")
    assert said[1].startswith(f"unchecked: {shard.name}")
