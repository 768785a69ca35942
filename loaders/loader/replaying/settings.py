"""The settings in which the cards of two runs differ, by what they decide."""

from __future__ import annotations

import json
from typing import Any

from .run_card import RunCard
from .transform_card import TransformCard

Differences = dict[str, tuple[str, str]]
"""Settings that differ: name to both values, as text."""

DECIDING: dict[str, tuple[str, ...]] = {
    "dataset": ("dataset",),
    "order": ("records", "weights", "shuffle", "seed", "batch_size", "rank", "world_size", "drop_last"),
    "labels": ("labels",),
    "columns": ("columns", "with_numbers"),
    "augmentation": ("transform", "seed"),
    "pixels": ("transform", "seed", "versions"),
}
OTHERS = ("on_bad_record",)  # it decides where a record is bad


def differences(one: RunCard, other: RunCard) -> Differences:
    """Return all settings in which the runs differ, with the versions of programs."""
    names = dict.fromkeys((*(name for names in DECIDING.values() for name in names), *OTHERS))
    return {name: texts for name in names if (texts := _texts(name, one, other))}


def deciding(kind: str, one: RunCard, other: RunCard) -> Differences:
    """Return those that decide what is of this kind. A seed decides nothing where nothing is random."""
    found = {name: texts for name in DECIDING[kind] if (texts := _texts(name, one, other))}
    if "seed" in found and not _draws(kind, one, other):
        del found["seed"]
    return found


def _draws(kind: str, one: RunCard, other: RunCard) -> bool:
    """Whether what is of this kind may be drawn at random, in either run."""
    if kind == "order":
        return one.shuffle is not None or other.shuffle is not None
    return any(card.transform is not None and card.transform.is_random for card in (one, other))


def _texts(name: str, one: RunCard, other: RunCard) -> tuple[str, str] | None:
    """Both values of a setting, None where they are equal."""
    if name == "transform":
        return _of_transforms(one.transform, other.transform)
    if name == "records":
        one, other = one.without_numbers(), other.without_numbers()
    texts = _text(one.to_json()[name]), _text(other.to_json()[name])
    return None if texts[0] == texts[1] else texts


def _of_transforms(one: TransformCard | None, other: TransformCard | None) -> tuple[str, str] | None:
    """Two transforms: the arguments that differ, or, where these are not known, the identities."""
    if one is None or other is None:
        return None if one is other else (one.title if one else "none", other.title if other else "none")
    if one.name == other.name and one.arguments is not None and other.arguments is not None:
        names = [name for name in one.arguments if one.arguments[name] != other.arguments[name]]
        return (_named(one, names), _named(other, names)) if names else None
    unknown = one.identity is None or other.identity is None
    same = one.name == other.name and (unknown or one.identity == other.identity)
    return None if same else (one.title, other.title)


def _named(transform: TransformCard, names: list[str]) -> str:
    arguments = transform.arguments or {}
    return f"{transform.name}({', '.join(f'{name}={_text(arguments[name])}' for name in names)})"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
