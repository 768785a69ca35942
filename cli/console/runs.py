"""Options that several commands share for a run of a loader."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from click.core import ParameterSource

from shardprep.cli.console import options
from shardprep.cli.console.output import say
from shardprep.formats.errors import MissingExtra
from shardprep.formats.runtime.files import errors_as_damage, open_regular
from shardprep.formats.shards.dataset import splits_of
from shardprep.formats.storage.open import open_records

if TYPE_CHECKING:
    from shardprep.loaders.loader.loader import Loader
    from shardprep.loaders.loader.run_card import RunCard
    from shardprep.loaders.transforms.contract import Transform


CARD_OPTIONS = ("batch_size", "shuffle", "seed", "world_size", "drop_last", "labels", "gaps")


def _parse_transform_name(text: str) -> str:
    module, colon, name = text.partition(":")
    if text not in options.CROPS and not (colon and all(map(str.isidentifier, [*module.split("."), name]))):
        raise ValueError(f"{text!r} is neither one of {', '.join(options.CROPS)} nor a package.module:name")
    return text


TRANSFORM_NAME = options.ParsedParam("transform", _parse_transform_name)
"""One of CROPS, or the import path of a transform: "my.module:name"."""


def typed_options() -> set[str]:
    """Return the parameters of the running command that were given on the command line."""
    ctx = click.get_current_context()
    return {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def refuse_typed(parameters: Container[str], typed: Container[str], reason: str) -> None:
    """Raise click.UsageError if one of the running command's parameters is among both."""
    options = click.get_current_context().command.params
    if refused := [each.opts[0] for each in options if each.name in parameters and each.name in typed]:
        raise click.UsageError(f"{', '.join(refused)}: {reason}; leave it out")


@dataclass(frozen=True)
class RunOptions:
    """The options of a run on the ``dataset``: values by parameter, and the ``typed`` parameters."""

    dataset: Path
    values: Mapping[str, Any]
    typed: set[str]

    def loader(self, card: RunCard | None) -> Loader:
        """Return a loader for the card's run, or, without a card, for the options.

        Raises click.UsageError if the dataset is not the card's, or an option is typed that the card sets.
        """
        # start-up time: OpenCV
        from shardprep.loaders.loader.loader import Loader
        from shardprep.loaders.loader.run_card import differences

        chosen = load_chosen(self.values["subset"], self.values["without"])
        if card is None:
            columns = self.values["columns"]
            return Loader(
                self.dataset,
                workers=0,
                columns=columns.split(",") if columns else None,
                transform=self._transform(),
                on_bad_record="skip",
                **chosen,
                **{name: self.values[name] for name in ("rank", *CARD_OPTIONS)},
            )
        refuse_typed(("pixels", *CARD_OPTIONS, "columns"), self.typed, "the card or state sets it")
        if "transform" in self.typed:
            chosen["transform"] = self._transform()
        if "rank" in self.typed:
            chosen["rank"] = self.values["rank"]
        place = splits_of(self.dataset).get(card.split, self.dataset)
        with open_records(place) as opened:
            if opened.root != card.dataset:
                raise click.UsageError(
                    f"the run used the dataset with the root {card.dataset}, not {opened.root}"
                )
        loader = Loader(place, workers=0, **card.options(**chosen))
        differing = differences(card, loader.card())
        if "rank" in self.typed:
            differing.pop("rank", None)
        versions = differing.pop("versions", None)
        if differing:
            loader.close()
            changes = "; ".join(
                f"its {name} was {was}, here it is {now}" for name, (was, now) in differing.items()
            )
            raise click.UsageError(f"this dataset does not match the card or state: {changes}")
        if versions and card.transform:
            say(f"note: the run used {versions[0]}, not {versions[1]}: pixels may differ", err=True)
        return loader

    def ordering_loader(self, card: RunCard) -> Loader:
        """Return a loader with the card's order but no transform, which may not be importable here."""
        plain = replace(card, transform=None, columns=None, on_bad_record="raise")
        return replace(self, typed=self.typed - {"transform"}).loader(plain)

    def _transform(self) -> Transform | None:
        """Return the transform that was named; modules in the current folder are found, too."""
        text: str = self.values["transform"]
        if text in options.CROPS:
            return options.make_transform(text, self.values["pixels"])
        module, _, name = text.partition(":")
        here = str(Path.cwd())
        sys.path.insert(0, here)
        try:
            transform: Transform = getattr(import_module(module), name)
        except MissingExtra:
            raise
        except (ImportError, AttributeError) as error:
            raise click.UsageError(f"--transform {text}: {error}") from error
        finally:
            sys.path.remove(here)
        return transform


def load_chosen(subset: Path | None, without: Path | None) -> dict[str, Any]:
    """Return the record numbers, keys or masks in the files of chosen_options. Raises DataError, OSError."""
    arrays = {}
    for name, file in (("records", subset), ("without", without)):
        if file is not None:
            with errors_as_damage(file, "give an array, as numpy.save writes it; keys: np.array(keys, str)"):
                os.close(open_regular(file))  # opening a FIFO below would block
                arrays[name] = np.lib.format.open_memmap(file, mode="r")  # checks the size first
                if not arrays[name].itemsize:
                    raise ValueError("has elements without a size")
    return arrays


chosen_options = options.combine_options(
    options.file("--subset", "FILE.npy", "Records that were chosen: a .npy file of numbers, keys or a mask."),
    options.file(
        "--without", "FILE.npy", "Records that were left out: a .npy file of numbers, keys or a mask."
    ),
)
"""The chosen records of a run that is given, if they are too many for its card."""
