"""The report of a verification: its findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardprep.formats.errors import DataError, OperationError, printable
from shardprep.formats.shards.manifest import Manifest

NO_MEMORY = "there is not enough memory; use fewer workers"


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a verification found.

    ``file`` is the file's name in the dataset, ``problem`` describes what is wrong, and ``key`` is the key of
    the record concerned, or None. The attributes may hold any text from a file; ``str`` is printable.
    """

    file: str
    problem: str
    key: str | None = None

    def __str__(self) -> str:
        return ": ".join(printable(part) for part in (self.file, self.key, self.problem) if part)


@dataclass
class CheckResult:
    """The result of checking one file, as in a :class:`Report`, and the content digests of its records."""

    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    digests: bytes = b""

    @property
    def is_empty(self) -> bool:
        """Whether everything was read, and there is nothing to report."""
        return not (self.findings or self.unchecked or self.notes)

    def add_to(self, other: Report | CheckResult) -> None:
        other.findings += self.findings
        other.unchecked += self.unchecked
        other.notes += self.notes


@dataclass
class Report:
    """The result of a verification.

    Attributes:
        dataset: The folder; for a dataset at a URL, the one in the cache.
        level: The level checked.
        manifest: The manifest, None if it is damaged.
        findings: Damage.
        unchecked: Files that could not be read.
        notes: Remarks that are not damage, such as messages of the decoder.
        rebuilt: Names of the files that a repair replaced before this verification.
        url: The URL of a dataset read through a cache, or None.
    """

    dataset: Path
    level: str
    manifest: Manifest | None = None
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    rebuilt: tuple[str, ...] = ()
    url: str | None = None

    @property
    def location(self) -> str:
        """The dataset's URL, or the path of its folder."""
        return self.url or os.fspath(self.dataset)

    def __repr__(self) -> str:
        counts = len(self.findings), len(self.unchecked), len(self.notes)
        found = "{:,} findings, {:,} unchecked, {:,} notes".format(*counts)
        return f"<Report on {self.location!r} ({self.level}): {found}>"

    @property
    def exit_code(self) -> int:
        """The exit code: 0 for intact, 1 for damaged or incomplete, 3 if not everything could be checked."""
        return 1 if self.findings else 3 if self.unchecked else 0

    def raise_for_findings(self) -> None:
        """Raise DataError or OperationError unless the dataset is intact."""
        if self.findings:
            more = f" (and {len(self.findings) - 1} more)" if len(self.findings) > 1 else ""
            files = {file.name for file in self.manifest.files} if self.manifest else set()
            mends = "; prep repair rebuilds it" if self.findings[0].file in files else ""
            raise DataError(f"{self.findings[0]}{more}{mends}", path=self.location)
        if self.unchecked:
            raise OperationError(f"could not check {self.unchecked[0]}", path=self.location)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        lists = {"findings": self.findings, "unchecked": self.unchecked, "notes": self.notes}
        return {
            "dataset": self.location,
            "level": self.level,
            "ok": self.exit_code == 0,
            **{name: getattr(self.manifest, name, None) for name in ("root", "content_root", "records")},
            **{
                name: [{"file": f.file, "key": f.key, "problem": f.problem} for f in found]
                for name, found in lists.items()
            },
        }


@contextmanager
def reading(name: str, report: Report | CheckResult) -> Iterator[None]:
    """Report damage of a file as a finding, and a system error as unchecked."""
    try:
        yield
    except DataError as error:
        report.findings.append(Finding(name, error.message))
    except OperationError as error:
        report.unchecked.append(Finding(name, error.message))
    except OSError as error:
        report.unchecked.append(Finding(name, error.strerror or str(error)))
    except MemoryError:
        report.unchecked.append(Finding(name, NO_MEMORY))
