"""The one place that unpickles: what a process and its own child say through memory and sockets without a name."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from types import FunctionType
from typing import Any

Buffers = list[pickle.PickleBuffer]


def dumps(value: object) -> bytes:
    """Raises whatever the value's class raises, when it cannot be pickled."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def dumps_beside(value: object) -> tuple[bytes, Buffers]:
    """A pickle, and the memory of arrays that is left beside it.

    What the main module defines goes by value where cloudpickle is installed, since no other process need have
    that module. Raises as :func:`dumps` does.
    """
    beside: Buffers = []
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=beside.append)
    except Exception:
        if not can_dump_by_value():
            raise
    else:
        if b"__main__" not in data or not can_dump_by_value():
            return data, beside
    beside = []
    return dumps_by_value(value, beside), beside


def can_dump_by_value() -> bool:
    """Whether cloudpickle is there."""
    try:
        import cloudpickle  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        return False
    return True


def dumps_by_value(value: object, beside: Buffers | None = None) -> bytes:
    """A pickle that holds the code of lambdas, closures and what the main module defines. Needs cloudpickle."""
    import cloudpickle

    keep = None if beside is None else beside.append
    return bytes(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep))


def dumps_noting_main(value: object) -> tuple[bytes, bool]:
    """A pickle, and whether it refers to what the main module defines, by name."""
    file = io.BytesIO()
    pickler = _MainNoted(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    return file.getvalue(), pickler.noted


class _MainNoted(pickle.Pickler):
    noted = False

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            self.noted = True
        return NotImplemented


def loads(data: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Never for what came from a file or a network: unpickling runs what the data says."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301
