"""The run that a command is about: of a card, of a state, or of options."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from click.core import ParameterSource

from shardprep.formats.dataset.splits import splits_of
from shardprep.formats.errors import DataError

from .options import transform_of
from .output import say

if TYPE_CHECKING:  # start-up time: OpenCV takes 50 ms
    from shardprep.loaders import Loader, Transform
    from shardprep.loaders.loader.replaying.run_card import RunCard

NAMED = ("train", "eval", "none")
OF_THE_CARD = {
    "pixels": "--size",
    "batch_size": "--batch-size",
    "shuffle": "--shuffle",
    "seed": "--seed",
    "world_size": "--world-size",
    "drop_last": "--drop-last",
    "labels": "--labels",
    "columns": "--columns",
}


class TransformName(click.ParamType[str]):
    """The name of a transform of this package, or the import path of another one: "my.module:name"."""

    name = "transform"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        module, colon, name = value.partition(":")
        if value not in NAMED and not (colon and module and name.isidentifier()):
            self.fail(f"{value!r} is none of {', '.join(NAMED)}, and no package.module:name", param, ctx)
        return str(value)


def transform_named(text: str, pixels: int) -> Transform | None:
    """Return the transform of a name or an import path; modules of the current folder are found, too."""
    if text in NAMED:
        return transform_of(text, pixels)
    module, _, name = text.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        transform: Transform = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"--transform {text}: {error}") from error
    finally:
        sys.path.remove(here)
    return transform


def records_in(file: Path) -> np.ndarray[Any, Any]:
    """Return the record numbers, or the mask, of a file of NumPy. Raises DataError, OSError."""
    try:
        array: np.ndarray[Any, Any] = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"is no array of NumPy ({error}); write it with numpy.save", path=file) from error
    return array


def given_options(ctx: click.Context, names: Iterable[str]) -> set[str]:
    """Return which of these parameters were typed."""
    return {name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def refuse_typed(names: Mapping[str, str], typed: Container[str], reason: str) -> None:
    """Raise UsageError if one of these options, by parameter, was typed."""
    if found := [option for name, option in names.items() if name in typed]:
        raise click.UsageError(f"{', '.join(found)}: {reason}; leave it out")


@dataclass(frozen=True)
class RunOptions:
    """The options of a run on the ``dataset``: values by parameter, and which of them were ``typed``."""

    dataset: Path
    values: Mapping[str, Any]
    typed: set[str]

    def loader(self, card: RunCard | None) -> Loader:
        """Return a loader of the run of the card, or of the options where that is None.

        Raises UsageError where the dataset or the options are not those of the card.
        """
        from shardprep.loaders import Loader  # start-up time: OpenCV

        if card is None:
            return Loader(self.dataset, workers=0, **self._of_options())
        refuse_typed(OF_THE_CARD, self.typed, "the card or state says that")
        loader = Loader(self._place(card), workers=0, **self._of_card(card))
        try:
            self._check(card, loader.card())
        except BaseException:
            loader.close()
            raise
        return loader

    def ordering_loader(self, card: RunCard) -> Loader:
        """Return a loader of the same order without a transform, which may not be at hand."""
        plain = replace(card, transform=None, columns=None, on_bad_record="raise")
        return replace(self, typed=self.typed - {"transform"}).loader(plain)

    def _place(self, card: RunCard) -> Path:
        return splits_of(self.dataset).get(card.split, self.dataset)

    def _of_options(self) -> dict[str, Any]:
        names = ("batch_size", "shuffle", "seed", "rank", "world_size", "drop_last", "labels")
        options = {name: self.values[name] for name in names}
        columns = self.values["columns"]
        options["columns"] = columns.split(",") if columns else None
        options["transform"] = transform_named(self.values["transform"], self.values["pixels"])
        return options | {"records": self._records(), "on_bad_record": "skip"}

    def _records(self) -> Any:
        subset: Path | None = self.values["subset"]
        return records_in(subset) if subset else None

    def _of_card(self, card: RunCard) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if "transform" in self.typed:
            given["transform"] = transform_named(self.values["transform"], self.values["pixels"])
            card = replace(card, transform=None)
        if self.values["subset"]:
            given["records"] = self._records()
            card = replace(card, records=None)
        if "rank" in self.typed:
            given["rank"] = self.values["rank"]
        return card.options() | given

    def _check(self, card: RunCard, made: RunCard) -> None:
        from shardprep.loaders.loader.replaying.settings import differences  # start-up time: OpenCV

        found = differences(card, made)
        if "rank" in self.typed:
            found.pop("rank", None)
        versions = found.pop("versions", None)
        if found:
            differing = "; ".join(
                f"its {name} is {was}, and here {now}" for name, (was, now) in found.items()
            )
            raise click.UsageError(f"this is not the run of the card or state: {differing}")
        if versions and card.transform:
            say(f"note: the run had {versions[0]}, here are {versions[1]}: pixels may differ", err=True)
