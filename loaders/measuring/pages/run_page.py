"""What a run of a loader or a flow has counted, as a page of HTML."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardprep.formats.errors import DataError
from shardprep.formats.pages.page import page
from shardprep.formats.sources.listing.text_file import read_small_file
from shardprep.formats.system.atomic_write import save_bytes
from shardprep.formats.system.user_path import user_path

from .bench_parts import bench_facts, disk_part, sweep_part
from .course_charts import course_charts
from .run_values import RunValues
from .timeline import timeline

if TYPE_CHECKING:
    from markupsafe import Markup

LARGEST = 64 << 20  # bytes of a file of stats; a trace of 200,000 spans has 100 MB


def run_page(
    values: Any, *, name: str = "run", disk: Mapping[str, Any] | None = None, trace: Any = None
) -> str:
    """Return the page of a run: stages with the limit marked, course, sweep, disk and timeline.

    ``values`` are the JSON values of stats (``stats.to_dict()``), or of ``prep bench-loader --json``.
    ``name`` stands in the title. ``disk`` has those of a disk's profile (``prep bench-disk --save``), and
    ``trace`` those of a Chrome trace of a loader. The page is one file without a script. Raises DataError for
    values of another form.
    """
    is_bench = isinstance(values, dict) and isinstance(values.get("stats"), dict)
    run = RunValues.of(values["stats"] if is_bench else values)
    bench = values if is_bench else {}
    try:
        shown = {
            "name": name,
            **{part: getattr(run, part) for part in ("stages", "limits", "rate", "unit")},
            "sentence": run.sentence or "Nothing is known before the second batch.",
            "facts": bench_facts(bench, values["stats"] if is_bench else values),
        }
        return page(
            "run",
            title=f"{name}: what limits",
            run=shown,
            charts=course_charts(run),
            sweep=sweep_part(bench.get("sweep")),
            disk=disk_part(bench, disk),
            timeline=_timeline(trace),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DataError(f"these are not the values of a run: {type(error).__name__}: {error}") from error


def _timeline(trace: Any) -> Markup | None:
    return None if trace is None else timeline(trace)


def json_of(path: str | os.PathLike[str], *, most: int = LARGEST) -> Any:
    """Return the values of a JSON file. Raises DataError, which names the file, and OSError."""
    path = user_path(path)
    try:
        return json.loads(read_small_file(path, most))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}", path=path) from error


def save_page(text: str, path: str | os.PathLike[str]) -> None:
    """Write a page, replacing an existing file at once.

    Raises OperationError if a folder or a device is there, OSError.
    """
    save_bytes(user_path(path), text.encode())
