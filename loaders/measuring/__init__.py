"""Measuring loaders, flows and disks."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader_speed import measure
    from .progress_bar import watched
    from .recording import tracing

__all__ = ["measure", "tracing", "watched"]


def __getattr__(name: str) -> Any:
    """Import a function on first access: each worker of a flow imports this package, for its arrivals."""
    if name == "measure":
        from .loader_speed import measure as found  # for start-up time
    elif name == "tracing":
        from .recording import (  # type: ignore[assignment]  # for start-up time
            tracing as found,
        )
    elif name == "watched":
        from .progress_bar import (  # type: ignore[assignment]  # for start-up time
            watched as found,
        )
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
