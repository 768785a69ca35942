"""Work on one dataset, on each split of a folder of splits, or on each part of a collection."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from shardprep.formats.dataset.collecting.collection_file import read_collection
from shardprep.formats.dataset.remote.open_dataset import datasets_in
from shardprep.formats.dataset.splits import is_collection
from shardprep.formats.errors import ShardprepError, UsageError

from .failures import Failure, failure_of
from .output import print_fields, print_json, say

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
    """What a command does with a dataset, and how it shows the result of type ``T``.

    ``collections`` says how the command takes a collection.
    """

    collections: ClassVar[Literal["refused", "by part", "as one"]] = "refused"

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

        An error ends the work on one dataset; of several, the others are still done. So is the work on the
        parts of a collection.
        """
        if self.collections != "as one" and isinstance(folder, Path) and is_collection(folder):
            return self._run_collection(folder, as_json=as_json)
        splits = datasets_in(folder)
        if splits:
            return self._run_each(folder, splits, as_json=as_json)
        result = self.result(folder)
        if as_json:
            print_json(self.to_json(result))
        else:
            self.show(result)
        return self.exit_code(result)

    def _run_collection(self, folder: Path, *, as_json: bool) -> int:
        if self.collections == "refused":
            raise UsageError("is a collection; give its parts, one by one", path=folder)
        collection = read_collection(folder)
        places = {part.name: folder / part.path for part in collection.parts}
        ends = {
            part.name: self._end(places[part.name], partial(part.manifest, folder), as_json=as_json)
            for part in collection.parts
        }
        code = self._tell(folder, places, ends, as_json=as_json, named="parts", root=collection.root)
        if not as_json:
            print_fields({"root": collection.root})
        return code

    def _run_each(self, folder: Path | str, splits: Mapping[str, Path | str], *, as_json: bool) -> int:
        ends = {name: self._end(dataset, as_json=as_json) for name, dataset in splits.items()}
        return self._tell(folder, splits, ends, as_json=as_json, named="splits")

    def _tell(
        self,
        folder: Path | str,
        places: Mapping[str, Path | str],
        ends: Mapping[str, T | Failure],
        *,
        as_json: bool,
        named: str,
        **about: str,
    ) -> int:
        """Say how the work on several datasets ended, and return the worst exit code."""
        results = {name: end for name, end in ends.items() if not isinstance(end, Failure)}
        code = worst(
            end.exit_code if isinstance(end, Failure) else self.exit_code(end) for end in ends.values()
        )
        if as_json:
            found = [
                {"dataset": str(places[name]), "path": str(places[name]), "ok": False, "error": end.to_json()}
                if isinstance(end, Failure)
                else {"ok": self.exit_code(end) == 0} | self.to_json(end)
                for name, end in ends.items()
            ]
            print_json({"folder": str(folder), "ok": code == 0, "exit_code": code, named: found} | about)
        else:
            undone = [name for name, end in ends.items() if isinstance(end, Failure)]
            failed = f"; {', '.join(undone)} failed" if undone else ""
            say(f"{folder}: {self.summary(results) if results else 'nothing was done'}{failed}")
        return code

    def _end(self, dataset: Any, check: Callable[[], object] | None = None, *, as_json: bool) -> T | Failure:
        """Return the result, or the failure, which is reported; ``check`` is called before the work."""
        try:
            if check is not None:
                check()
            result = self.result(dataset)
        except (ShardprepError, OSError) as error:
            failure = failure_of(error)
            failure.report(as_json=False)
            return failure
        if not as_json:
            self.show(result)
        return result
