"""Work on one dataset, or on each split of a folder of splits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from shardprep.formats.dataset.remote.open_dataset import datasets_in
from shardprep.formats.errors import ShardprepError

from .failures import Failure, failure_of
from .output import print_json, say

T = TypeVar("T")

EXIT_DAMAGED = 1


def worst(codes: Iterable[int]) -> int:
    """Return the exit code for all: damage, if there is any, else the largest.

    >>> worst([0, 3, 1]), worst([3, 4, 0]), worst([0, 0])
    (1, 4, 0)
    """
    found = set(codes)
    return EXIT_DAMAGED if EXIT_DAMAGED in found else max(found)


class DatasetWork(ABC, Generic[T]):
    """What a command does with a dataset, and how it shows the result of type ``T``."""

    @abstractmethod
    def result(self, dataset: Any) -> T:
        """Return the result for the dataset in a folder, or at a URL. Raises ShardprepError, OSError."""

    @abstractmethod
    def show(self, result: T) -> None:
        """Print the result as text."""

    @abstractmethod
    def to_json(self, result: T) -> dict[str, Any]:
        """Return the result as a JSON object."""

    @abstractmethod
    def summary(self, results: Mapping[str, T]) -> str:
        """Return one line about all splits, by name, of which there is a result."""

    def exit_code(self, result: T) -> int:
        """Return the exit code that the result asks for."""
        return 0

    def run(self, folder: Path | str, *, as_json: bool) -> int:
        """Do the work on the dataset, or on every split in the folder, and return the worst exit code.

        An error ends the work on one dataset; of several, the others are still done.
        """
        splits = datasets_in(folder)
        if splits:
            return self._run_each(folder, splits, as_json=as_json)
        result = self.result(folder)
        if as_json:
            print_json(self.to_json(result))
        else:
            self.show(result)
        return self.exit_code(result)

    def _run_each(self, folder: Path | str, splits: Mapping[str, Path | str], *, as_json: bool) -> int:
        ends = {name: self._end(dataset, as_json=as_json) for name, dataset in splits.items()}
        results = {name: end for name, end in ends.items() if not isinstance(end, Failure)}
        code = worst(
            end.exit_code if isinstance(end, Failure) else self.exit_code(end) for end in ends.values()
        )
        if as_json:
            found = [
                {"dataset": str(splits[name]), "ok": False, "error": end.to_json()}
                if isinstance(end, Failure)
                else self.to_json(end)
                for name, end in ends.items()
            ]
            print_json({"folder": str(folder), "ok": code == 0, "exit_code": code, "splits": found})
        else:
            undone = [name for name, end in ends.items() if isinstance(end, Failure)]
            failed = f"; {', '.join(undone)} failed" if undone else ""
            say(f"{folder}: {self.summary(results) if results else 'nothing was done'}{failed}")
        return code

    def _end(self, dataset: Any, *, as_json: bool) -> T | Failure:
        try:
            result = self.result(dataset)
        except (ShardprepError, OSError) as error:
            failure = failure_of(error)
            failure.report(as_json=False)
            return failure
        if not as_json:
            self.show(result)
        return result
