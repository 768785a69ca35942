"""The gate: checks a report's findings against limits, as a step of continuous integration."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any
from xml.etree import ElementTree

from shardprep.formats.errors import UsageError, printable
from shardprep.formats.images.decode import check_decoder
from shardprep.formats.reports.examine import KINDS as OBSERVED, OF_PIXELS, THIS, Examination, report
from shardprep.formats.runtime.files import read_small_file, save_bytes
from shardprep.formats.runtime.progress import Progress, check_flags, is_number
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.dataset import refuse_folder_of_splits
from shardprep.formats.shards.manifest import read_manifest

OTHER_NAMES = {"suspects": "mislabelled", "equal bytes": "duplicates", "look alike": "similar"}
KINDS = {OTHER_NAMES.get(kind, kind.lower().replace(" ", "-")): kind for kind in OBSERVED}
"""The kind of observation that each limit bounds, by the limit's name."""

MAX_NAMED = 10  # records per check

Limit = int | float


@dataclass(frozen=True)
class GateCheck:
    """One check of a gate.

    Attributes:
        name: "root", "canaries", or the name of a limit.
        passed: Whether the check passed.
        found: The root, the digest of the decoder's pixels, or the number of records (for "empty-classes", of
            classes).
        limit: The required root, the reference digest, or the largest number, or share below 1, of records.
        records: The keys of the first of these records, or names of classes or canaries.
        is_partial: Whether only a sample of the images was examined, so that there may be more.
    """

    name: str
    passed: bool
    found: int | str
    limit: Limit | str
    records: tuple[str, ...] = ()
    is_partial: bool = False

    def named(self) -> list[str]:
        """Return the ``records`` as printable lines, and a last one on how many there are besides."""
        more = self.found - len(self.records) if isinstance(self.found, int) else 0
        return [*map(printable, self.records), *([f"and {more:,} more"] if more > 0 else [])]

    def __str__(self) -> str:
        if self.name in ("root", "canaries"):
            return f"{self.found}" if self.passed else f"{self.found}, not {self.limit}"
        most = f"{self.limit:.6g} of all" if isinstance(self.limit, float) else f"{self.limit:,}"
        least = "at least " if self.is_partial else ""
        return f"{least}{self.found:,}, at most {most}"


@dataclass(frozen=True)
class GateResult:
    """The checks of a dataset.

    Attributes:
        dataset: Its folder.
        root: Its root.
        records: The number of its records.
        looked_at: The number of decoded images, including the other dataset's.
        checks: The checks, "root" and "canaries" first.
    """

    dataset: str
    root: str
    records: int
    looked_at: int
    checks: tuple[GateCheck, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self) | {"passed": self.passed}

    def to_junit(self) -> bytes:
        """Return the result as a JUnit XML test suite, with a test case per check."""
        failures = sum(not check.passed for check in self.checks)
        name = f"prep gate {printable(self.dataset)}"
        suite = ElementTree.Element(
            "testsuite", name=name, tests=str(len(self.checks)), failures=str(failures), errors="0"
        )
        for check in self.checks:
            case = ElementTree.SubElement(suite, "testcase", classname=name, name=check.name)
            if not check.passed:
                failure = ElementTree.SubElement(case, "failure", message=printable(f"{check.name}: {check}"))
                failure.text = "\n".join(check.named())
        data: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
        return data

    def save_junit(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_junit` to a file, replaced atomically. Raises OperationError, OSError."""
        save_bytes(user_path(path), self.to_junit())


def gate(
    dataset: str | os.PathLike[str],
    limits: Mapping[str, Limit],
    *,
    root: str | None = None,
    canaries: bool = False,
    against: str | os.PathLike[str] | None = None,
    pixels: str = "all",
    workers: int | None = None,
    progress: Progress | None = None,
) -> GateResult:
    """Check a dataset against limits: damaged images, leaks, wrong labels, duplicates and oddities.

    The findings of :func:`.report` are counted as :meth:`.Examination.findings` lists them: of several
    copies all but the first, and both of two images with different labels.

    Args:
        dataset: The dataset's folder.
        limits: The largest number of records for each name in KINDS to check; a float below 1 is their
            largest share of the dataset's records.
        root: The required root; checked first, and nothing is read if it differs.
        canaries: Whether this machine must decode and resize images to the reference pixels, as x86-64 does.
        against: The folder of another dataset, whose images must not be in this one: required for the limit
            of "leaks", which is then 0 by default.
        pixels: The images to read: "all", "sample", or "none" if no limit needs them.
        workers: Number of processes that decode; None is one per usable CPU.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The checks: "root" and "canaries" first, then the others in the order of KINDS.

    Raises:
        UsageError: A limit is unknown or not a number, or needs images or another dataset that are not given.
        ManifestDamaged, UnknownVersion, OperationError, OSError: As :func:`.report` raises them.
    """
    check_flags(canaries=canaries)
    if not isinstance(limits, Mapping):
        raise UsageError(f"limits must be a dict of names and numbers, not {limits!r}")
    wanted = ({} if against is None else {"leaks": 0}) | dict(limits)
    for name, limit in wanted.items():
        if name not in KINDS:
            raise UsageError(f"unknown limit {name!r}; choose from {', '.join(KINDS)}")
        is_whole = isinstance(limit, Integral)
        if not is_number(limit) or limit < 0 or (limit >= 1 and not is_whole):
            raise UsageError(
                f"the limit of {name} must be a number of records, or a share below 1, not {limit!r}"
            )
        wanted[name] = int(limit) if is_whole else float(limit)  # also numbers of NumPy
    if not wanted and root is None and not canaries:
        raise UsageError(f"a gate needs a root, canaries or a limit; limits are {', '.join(KINDS)}")
    if "leaks" in wanted and against is None:
        raise UsageError(
            "a limit of leaks needs another dataset to compare with: give --against (in Python against=)"
        )
    if pixels == "none" and (lacking := [name for name in wanted if KINDS[name] in OF_PIXELS]):
        raise UsageError(f"a limit of {lacking[0]} needs images: give pixels='all' or 'sample'")
    place = user_path(dataset)
    refuse_folder_of_splits(place)
    manifest = read_manifest(place)
    checks = [] if root is None else [GateCheck("root", manifest.root == root, manifest.root, root)]
    if canaries:
        decoder = check_decoder()
        passed = not decoder.differing
        checks.append(GateCheck("canaries", passed, decoder.digest, decoder.reference, decoder.differing))
    if not wanted or not all(check.passed for check in checks):
        return GateResult(os.fspath(place), manifest.root, manifest.records, 0, tuple(checks))
    needs_pixels = any(KINDS[name] in OF_PIXELS for name in wanted)
    examination = report(
        place,
        against=against if "leaks" in wanted else None,
        pixels=pixels if needs_pixels else "none",
        workers=workers,
        progress=progress,
    )
    checks += [_check(name, wanted[name], examination) for name in KINDS if name in wanted]
    looked_at = examination.found["looked_at"]["decoded"]
    return GateResult(os.fspath(place), manifest.root, manifest.records, looked_at, tuple(checks))


def _check(name: str, limit: Limit, examination: Examination) -> GateCheck:
    observed = {each["kind"]: each for each in examination.found["observations"]}.get(KINDS[name])
    if observed is None:
        looked_at = examination.found["looked_at"]
        is_partial = KINDS[name] in OF_PIXELS and looked_at["decoded"] < looked_at["images"]
        return GateCheck(name, True, 0, limit, is_partial=is_partial)
    count = len(set(observed["leave_out"])) or observed["count"]
    # a division, as 0.29 * 100 is less than 29
    amount = count / max(examination.found["dataset"]["records"], 1) if isinstance(limit, float) else count
    records = [*observed["records"], *(each for pair in observed["pairs"] for each in pair["records"])]
    counted = {(THIS, record) for record in observed["leave_out"]}
    keys = dict.fromkeys(each["key"] for each in records if (each["dataset"], each["record"]) in counted)
    named = (*keys, *observed["names"])[:MAX_NAMED]
    return GateCheck(name, amount <= limit, count, limit, named, observed["is_partial"])


def read_limits(path: str | os.PathLike[str]) -> tuple[str | None, dict[str, Any]]:
    """Return ``root`` and the table ``max`` of a TOML file. Raises UsageError for anything else, OSError."""
    file = user_path(path)
    try:
        values = tomllib.loads(read_small_file(file, damaged=UsageError).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not TOML: {error}", path=file) from error
    unknown = values.keys() - {"root", "max"}
    limits, root = values.get("max", {}), values.get("root")
    if unknown or not isinstance(limits, dict) or not isinstance(root, str | None):
        raise UsageError("may only contain root = 'sha256:…' and a table [max] of limits", path=file)
    return root, limits
