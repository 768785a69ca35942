"""The executor of a cluster that a command was told to work on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager

from shardprep.formats import OperationError, UsageError

CONNECT_TIMEOUT_S = 10
CLOSE_TIMEOUT_S = 2


@contextmanager
def cluster_executor(address: str) -> Iterator[Executor]:
    """Connect to Dask's scheduler at that address; yield an executor of its workers.

    Raises UsageError if Dask is not installed, or the address is none; OperationError if nothing answers.
    """
    try:
        from distributed import Client  # start-up time, and only with the extra dask
    except ImportError as error:
        raise UsageError("--cluster needs Dask: pip install 'shardprep[dask]'") from error
    logging.disable(logging.CRITICAL)  # what fails is an error of the work; Dask and its parts log tracebacks
    try:
        client = Client(address, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except OSError as error:  # also the one for the time
        raise OperationError(f"no scheduler of Dask answers at {address}; see whether it runs") from error
    except ValueError as error:
        raise UsageError(f"{address} is no address of a scheduler, such as tcp://host:8786") from error
    try:
        yield client.get_executor()
    finally:
        client.close(timeout=CLOSE_TIMEOUT_S)
