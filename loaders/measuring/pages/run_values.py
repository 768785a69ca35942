"""The figures of a run, from the JSON values of its stats; a file of them is not trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardprep.formats.errors import DataError

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


@dataclass(frozen=True)
class RunValues:
    """The ``stages`` in the order of the data, the name of the one that ``limits``, and a ``sentence``.

    ``limits`` is "" and ``rate`` 0 where nothing is known yet. ``rate`` is in ``unit`` per second.
    """

    stages: tuple[ShownStage, ...]
    limits: str
    rate: float
    unit: str
    sentence: str

    @classmethod
    def of(cls, values: Any) -> RunValues:
        """Return the figures of ``to_dict()`` of a loader's, a flow's or an input's stats.

        Raises DataError for values of another form.
        """
        try:
            verdict = values["verdict"] or {"limit": "", "rate": 0.0, "unit": "images", "sentence": ""}
            found = cls(
                tuple(map(_stage, _loads(values)[:MOST_STAGES])),
                _text(verdict["limit"]),
                _number(verdict["rate"]),
                _text(verdict["unit"]),
                _text(verdict["sentence"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"these are not the stats of a loader, a flow or an input: {error}") from error
        return found


def _loads(values: Mapping[str, Any]) -> list[Any]:
    """The stages up to the step; an input has those of its source before its own."""
    if "loads" in values:
        return _list(values["loads"])
    before = values["source"] or values["loader"]
    stages = _loads(before) if before else []
    own = [values["load"]] if values["load"] else []
    return [*(stages if values["source"] else stages[:-1]), *own]  # a loader's step is the input's own work


def _stage(load: Mapping[str, Any]) -> ShownStage:
    limit = load["limit"]
    return ShownStage(
        _text(load["name"]),
        _text(load["place"]),
        share=_number(load["utilisation"], most=1.0),
        starved=_number(load["starved"], most=1.0),
        blocked=_number(load["blocked"], most=1.0),
        seconds=_number(load["seconds"]),
        limit=math.inf if limit is None else _number(limit),
    )


def _number(value: object, *, most: float = 1e18) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{str(value)[:40]!r} is not a number of 0 to {most:g}")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not text")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} is not a list")
    return value
