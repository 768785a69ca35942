"""Options that several commands share for a run of a loader, and for a cluster."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import numpy as np
from click.core import ParameterSource

from shardprep.cli.console.options import Option, Parsed, file_option, together, transform_of
from shardprep.cli.console.output import say
from shardprep.formats.errors import DataError, MissingExtra, OperationError, UsageError
from shardprep.formats.runtime.jobs import RayExecutor
from shardprep.formats.shards.dataset import splits_of

if TYPE_CHECKING:
    from shardprep.loaders.loader.loader import Loader
    from shardprep.loaders.loader.run_card import RunCard
    from shardprep.loaders.transforms.contract import Transform


NAMED = ("train", "eval", "none")
OF_A_RUN = ("batch_size", "shuffle", "seed", "world_size", "drop_last", "labels", "gaps")


def _transform_name(text: str) -> str:
    module, colon, name = text.partition(":")
    if text not in NAMED and not (colon and module and name.isidentifier()):
        raise ValueError(f"{text!r} is neither one of {', '.join(NAMED)} nor a package.module:name")
    return text


TRANSFORM_NAME = Parsed("transform", _transform_name)
"""One of NAMED, or the import path of a transform: "my.module:name"."""


def typed_options() -> set[str]:
    """Return the parameters of the running command that were given on the command line."""
    ctx = click.get_current_context()
    return {name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def option_of(parameter: str) -> str:
    """Return the option of the running command that sets a parameter."""
    options = click.get_current_context().command.params
    return next(option.opts[0] for option in options if option.name == parameter)


def refuse_typed(parameters: Iterable[str], typed: Container[str], reason: str) -> None:
    """Raise click.UsageError if one of these parameters is among the typed ones."""
    if found := [option_of(name) for name in parameters if name in typed]:
        raise click.UsageError(f"{', '.join(found)}: {reason}; leave it out")


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

        chosen = chosen_in(self.values["subset"], self.values["without"])
        if card is None:
            columns = self.values["columns"]
            return Loader(
                self.dataset,
                workers=0,
                columns=columns.split(",") if columns else None,
                transform=self._transform(),
                on_bad_record="skip",
                **chosen,
                **{name: self.values[name] for name in ("rank", *OF_A_RUN)},
            )
        refuse_typed(("pixels", *OF_A_RUN, "columns"), self.typed, "the card or state sets it")
        if "transform" in self.typed:
            chosen["transform"] = self._transform()
        if "rank" in self.typed:
            chosen["rank"] = self.values["rank"]
        place = splits_of(self.dataset).get(card.split, self.dataset)
        loader = Loader(place, workers=0, **card.options(**chosen))
        found = differences(card, loader.card())
        if "rank" in self.typed:
            found.pop("rank", None)
        versions = found.pop("versions", None)
        if found:
            loader.close()
            differing = "; ".join(
                f"its {name} was {was}, here it is {now}" for name, (was, now) in found.items()
            )
            raise click.UsageError(f"this dataset does not match the card or state: {differing}")
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
        if text in NAMED:
            return transform_of(text, self.values["pixels"])
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


def chosen_in(subset: Path | None, without: Path | None) -> dict[str, Any]:
    """Return the record numbers, keys or masks in the files of chosen_options. Raises DataError, OSError."""
    found = {}
    for name, file in (("records", subset), ("without", without)):
        try:
            if file is not None:
                found[name] = np.load(file, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DataError(f"is not a NumPy array ({error}); write it with numpy.save", path=file) from error
    return found


chosen_options = together(
    file_option("--subset", "FILE.npy", "Records that were chosen: a .npy file of numbers or a mask."),
    file_option(
        "--without", "FILE.npy", "Records that were left out: a .npy file of numbers, keys or a mask."
    ),
)
"""The chosen records of a run that is given, if they are too many for its card."""


CONNECT_TIMEOUT_S = 10
CLOSE_TIMEOUT_S = 2
RAY_PORT = 10001  # the default port of Ray's client server

cluster_option: Option = click.option(
    "--cluster",
    metavar="ADDRESS",
    help=(
        "Work on a cluster: the Dask scheduler at tcp://HOST:PORT, Ray at ray://HOST:PORT, or auto for Ray "
        "on this machine. --workers is then the number of shards at a time."
    ),
)


def cluster_executor(address: str | None) -> AbstractContextManager[Executor | None]:
    """Return a connection to the cluster, whose context is an executor; None without an address."""
    if address is None:
        return nullcontext()
    logging.disable(logging.CRITICAL)  # engines log tracebacks; failures are raised by the work anyway
    return _ray(address) if address == "auto" or address.startswith("ray://") else _dask(address)


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        import distributed  # start-up time, and only with the extra dask
    except ImportError as error:
        raise MissingExtra.of("--cluster tcp://", "Dask", "dask") from error
    engine: Any = distributed  # typed only where mypy finds it
    try:
        client = engine.Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except OSError as error:  # a TimeoutError, too
        raise OperationError(f"no Dask scheduler answers at {address}; check that it is running") from error
    except ValueError as error:
        raise UsageError(
            f"{address} is not a cluster address, such as tcp://host:8786, ray://host:10001 or auto"
        ) from error
    try:
        yield client.get_executor()
    finally:
        client.close(timeout=CLOSE_TIMEOUT_S)


@contextmanager
def _ray(address: str) -> Iterator[Executor]:
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else Ray starts a local cluster when this one is lost
    try:
        import ray  # start-up time, and only with the extra ray
    except ImportError as error:
        raise MissingExtra.of(f"--cluster {address}", "Ray", "ray") from error
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _knock(address)
        for pause_s in (1, 3, 0):
            try:
                ray.init(address, log_to_driver=False)
                break
            except ConnectionAbortedError:  # a young cluster may not serve clients yet
                if not pause_s:
                    raise
                time.sleep(pause_s)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise OperationError(
            f"no Ray cluster answers at {address} ({reason}); check that it is running"
        ) from error
    except RuntimeError as error:  # a different version of Ray or Python
        raise OperationError(f"the Ray cluster at {address} cannot be used: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray sets its own
    executor = RayExecutor()
    try:
        yield executor
    except Exception:
        _disconnect(executor, ray)
        raise
    # not when interrupted: a thread of Ray may wait for this one, and the process ends anyway
    _disconnect(executor, ray)


def _disconnect(executor: Executor, engine: Any) -> None:
    executor.shutdown(wait=False)
    engine.shutdown()


def _knock(address: str) -> None:
    """Raise OSError if nothing listens at a ``ray://`` address, which Ray would try for half a minute."""
    if address == "auto":
        return
    try:
        parts = urlsplit(address)
        place = (parts.hostname or "", parts.port or RAY_PORT)
    except ValueError as error:
        raise UsageError(f"{address} is not a cluster address, such as ray://host:{RAY_PORT}") from error
    socket.create_connection(place, CONNECT_TIMEOUT_S).close()
