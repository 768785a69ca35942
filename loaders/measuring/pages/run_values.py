"""The figures of a run, from the JSON values of its stats; a file of them is not trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardprep.formats.errors import DataError

MOST_PARTS = 1000  # of the time
MOST_STAGES = 100  # the longest flows have some dozens


@dataclass(frozen=True)
class ShownStage:
    """A stage: its ``share`` of the time in work, 0..1, and seconds per image; ``limit`` is a rate or inf."""

    name: str
    place: str
    share: float
    starved: float
    blocked: float
    seconds: float
    limit: float

    @property
    def is_finite(self) -> bool:
        """Whether the stage has a limit; one that takes no time has none."""
        return math.isfinite(self.limit)


@dataclass(frozen=True)
class CoursePart:
    """What came in a part of the time, in seconds since the first batch."""

    began: float
    batches: float
    rows: float
    ready: float
    waited: float


@dataclass(frozen=True)
class RunValues:
    """The ``stages`` in the order of the data, the name of the one that ``limits``, and a ``sentence``.

    ``limits`` is "" and ``rate`` 0 where nothing is known yet. ``rate`` is in ``unit`` per second. ``course``
    has parts of ``part_seconds`` each; it is empty where the stats have none, as a flow's.
    """

    stages: tuple[ShownStage, ...]
    limits: str
    rate: float
    unit: str
    sentence: str
    course: tuple[CoursePart, ...] = ()
    part_seconds: float = 1.0

    @classmethod
    def of(cls, values: Any) -> RunValues:
        """Return the figures of ``to_dict()`` of a loader's, a flow's or an input's stats.

        Raises DataError for values of another form.
        """
        try:
            verdict = values["verdict"] or {"limit": "", "rate": 0.0, "unit": "images", "sentence": ""}
            found = cls(
                tuple(map(_stage, _loads(values)[:MOST_STAGES])),
                text_in(verdict["limit"]),
                number_in(verdict["rate"]),
                text_in(verdict["unit"]),
                text_in(verdict["sentence"]),
                *_course(values),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"these are not the stats of a loader, a flow or an input: {type(error).__name__}: {error}"
            ) from error
        return found


def _loads(values: Mapping[str, Any]) -> list[Any]:
    """The stages up to the step; an input has those of its source before its own."""
    if "loads" in values:
        return list_in(values["loads"])
    before = values["source"] or values["loader"]
    stages = _loads(before) if before else []
    own = [values["load"]] if values["load"] else []
    return [*(stages if values["source"] else stages[:-1]), *own]  # a loader's step is the input's own work


def _course(values: Mapping[str, Any]) -> tuple[tuple[CoursePart, ...], float]:
    """The parts of the time and their length; those of the loader that an input draws from."""
    while values.get("loads") is None:
        values = values["source"] or values["loader"] or {"loads": []}
    found = list_in(values.get("course", []))[:MOST_PARTS]
    names = ("began", "batches", "rows", "ready", "waited")
    return tuple(CoursePart(*(number_in(part[name]) for name in names)) for part in found), (
        number_in(found[0]["seconds"]) or 1.0 if found else 1.0
    )


def _stage(load: Mapping[str, Any]) -> ShownStage:
    limit = load["limit"]
    return ShownStage(
        text_in(load["name"]),
        text_in(load["place"]),
        share=number_in(load["utilisation"], most=1.0),
        starved=number_in(load["starved"], most=1.0),
        blocked=number_in(load["blocked"], most=1.0),
        seconds=number_in(load["seconds"]),
        limit=math.inf if limit is None else number_in(limit),
    )


def number_in(value: object, *, most: float = 1e18) -> float:
    """Return a number of a JSON value. Raises ValueError for another value, and outside of 0 to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not a number of 0 to {most:g}")
    return float(value)


def text_in(value: object) -> str:
    """Return the text of a JSON value. Raises TypeError for another value."""
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not text")
    return value


def list_in(value: object) -> list[Any]:
    """Return the list of a JSON value, or its tuple. Raises TypeError for another value."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{str(value)[:40]!r} is not a list")
    return list(value)
