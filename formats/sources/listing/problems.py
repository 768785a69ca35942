"""The problems of a source: of each kind, the number of its cases and the first one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from shardprep.formats.errors import ShardprepError
from shardprep.formats.printable import printable


@dataclass(frozen=True)
class Problem:
    """One kind of problem: the error of the first case, and the number of cases."""

    first: ShardprepError | OSError
    count: int = 1

    def __str__(self) -> str:
        return f"{self._text}{self._of_how_many}"

    @property
    def _text(self) -> str:
        if isinstance(self.first, OSError) and self.first.filename is not None:
            return f"{printable(str(self.first.filename))}: {self.first.strerror}"
        return str(self.first)

    @property
    def exit_code(self) -> int:
        """The exit code of ``prep`` for this problem."""
        return getattr(self.first, "exit_code", ShardprepError.exit_code)

    def to_json(self) -> dict[str, Any]:
        """Return the problem as a JSON object."""
        return {"count": self.count, "first": self._text, "exit_code": self.exit_code}

    @property
    def _of_how_many(self) -> str:
        return f" (the first of {self.count:,})" if self.count > 1 else ""

    def error(self, others: str) -> ShardprepError | OSError:
        """Return the first case's error; its message counts the cases and ends with ``others``."""
        if isinstance(self.first, OSError):
            return self.first
        whole = copy(self.first)
        whole.message = f"{self.first.message}{self._of_how_many}{others}"
        return whole


class Problems:
    """The problems that were found so far, in the order of their first cases. Picklable."""

    def __init__(self) -> None:
        self._of_kind: dict[str, Problem] = {}

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._of_kind.values())

    def __bool__(self) -> bool:
        return bool(self._of_kind)

    @property
    def cases(self) -> int:
        """The number of cases of all kinds."""
        return sum(problem.count for problem in self)

    def add(self, error: ShardprepError | OSError, kind: str = "") -> None:
        """Add a case. Cases of one ``kind`` are counted together; by default these have one message."""
        alike = error.strerror if isinstance(error, OSError) else error.message
        self._count(kind or alike or type(error).__name__, Problem(error))

    def merge(self, others: Problems) -> None:
        """Add all cases of ``others``."""
        for kind, problem in others._of_kind.items():
            self._count(kind, problem)

    @contextmanager
    def collected(self, kind: str = "") -> Iterator[None]:
        """Add the ShardprepError or OSError that leaves the block, which then ends without it."""
        try:
            yield
        except (ShardprepError, OSError) as error:
            self.add(error, kind)

    def raise_all(self) -> None:
        """Raise the first problem's error, with a message of all problems; return if there are none."""
        if not self._of_kind:
            return
        first, *others = self
        raise first.error("".join(f"; also: {other}" for other in others))

    def _count(self, kind: str, problem: Problem) -> None:
        known = self._of_kind.get(kind)
        self._of_kind[kind] = replace(known, count=known.count + problem.count) if known else problem
