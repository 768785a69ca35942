"""The executor of a cluster that a command was told to work on."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import click

from shardprep.formats import OperationError, UsageError
from shardprep.formats.processes.executors.ray_executor import RayExecutor

CONNECT_TIMEOUT_S = 10
CLOSE_TIMEOUT_S = 2
RAY_PORT = 10001  # of Ray's client server, where the address names none

cluster_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--cluster",
    metavar="ADDRESS",
    help="Work on a cluster: Dask's scheduler at tcp://HOST:PORT, Ray at ray://HOST:PORT, or auto, Ray on this "
    "machine. --workers is then shards at a time.",
)


def cluster_executor(address: str | None) -> AbstractContextManager[Executor | None]:
    """Connect to the cluster at that address; the context has an executor of its workers, None without one.

    Entering raises UsageError if the engine is not installed, or the address is none; OperationError if
    nothing answers.
    """
    if address is None:
        return nullcontext()
    logging.disable(logging.CRITICAL)  # what fails is an error of the work; engines log tracebacks
    return _ray(address) if address == "auto" or address.startswith("ray://") else _dask(address)


@contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        import distributed  # start-up time, and only with the extra dask
    except ImportError as error:
        raise UsageError("--cluster tcp:// needs Dask: pip install 'shardprep[dask]'") from error
    engine: Any = distributed  # typed or not, where mypy finds it
    try:
        client = engine.Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except OSError as error:  # also the one for the time
        raise OperationError(f"no scheduler of Dask answers at {address}; see whether it runs") from error
    except ValueError as error:
        raise UsageError(
            f"{address} is no address of a cluster, such as tcp://host:8786, ray://host:10001 or auto"
        ) from error
    try:
        yield client.get_executor()
    finally:
        client.close(timeout=CLOSE_TIMEOUT_S)


@contextmanager
def _ray(address: str) -> Iterator[Executor]:
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else Ray starts a cluster here once the other is lost
    try:
        import ray  # start-up time, and only with the extra ray
    except ImportError as error:
        raise UsageError(f"--cluster {address} needs Ray: pip install 'shardprep[ray]'") from error
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _knock(address)
        ray.init(address, log_to_driver=False)
    except OSError as error:
        raise OperationError(f"no cluster of Ray answers at {address}; see whether it runs") from error
    except RuntimeError as error:  # another version of Ray or of Python
        raise OperationError(f"the cluster of Ray at {address} cannot be used: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray sets its own
    executor = RayExecutor()
    try:
        yield executor
    except Exception:
        _disconnect(executor, ray)
        raise
    _disconnect(
        executor, ray
    )  # not when interrupted: a thread of Ray may wait for this one, and the process ends


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
        raise UsageError(f"{address} is no address of a cluster, such as ray://host:{RAY_PORT}") from error
    socket.create_connection(place, CONNECT_TIMEOUT_S).close()
