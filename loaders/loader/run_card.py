"""Run cards: the options that determine the records of each step and their pixels.

Cards of different machines and runs are compared as text.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain, zip_longest
from math import nan
from types import CodeType
from typing import Any, ClassVar, Literal, Self

import numpy as np

from shardprep.formats.errors import ShardprepError, UsageError
from shardprep.formats.runtime.json_record import JsonRecord, parse_as
from shardprep.formats.runtime.progress import count_of
from shardprep.loaders.loader.digest import digest_of
from shardprep.loaders.order.epoch import Shuffle
from shardprep.loaders.order.parts import MAX_RECORDS, Records
from shardprep.loaders.transforms.contract import LibraryVersion, Transform, check_choice
from shardprep.loaders.transforms.transforms import ColorJitter, Cut, EvalTransform, TrainTransform
from shardprep.loaders.transforms.views import Views

MAX_LISTED = 4096


@dataclass(frozen=True)
class ChosenRecords:
    """The ``count`` of some records, a ``digest`` of their numbers, and the ``numbers`` if they are few."""

    count: int
    digest: str
    numbers: tuple[int, ...] | None

    def __post_init__(self) -> None:
        numbers = self.numbers or ()
        if len(numbers) > MAX_LISTED or max(numbers, default=0) >= MAX_RECORDS:
            raise ValueError("it lists too many records, or too large numbers")

    @classmethod
    def of(cls, numbers: Records) -> Self:
        """Describe these record numbers; more than MAX_LISTED are not listed."""
        listed = tuple(numbers.tolist()) if len(numbers) <= MAX_LISTED else None
        return cls(len(numbers), digest_of(numbers), listed)

    def __str__(self) -> str:
        return f"{count_of(self.count, 'record')} with the digest {self.digest}"

    def require_numbers(self, option: str) -> Records:
        """Return the record numbers, int64. Raises UsageError, which names the option, if none are listed."""
        if self.numbers is None:
            raise UsageError(
                f"the run's card or state does not list the {count_of(self.count, 'record')} of --{option}; give the same "
                f"ones (--{option} FILE.npy), or a log that lists them"
            )
        return np.array(self.numbers, np.int64)


OWN_TRANSFORMS: dict[str, Callable[..., Transform]] = {
    kind.__name__: kind for kind in (TrainTransform, EvalTransform, Views, Cut)
}


@dataclass(frozen=True)
class TransformCard:
    """A transform: its ``name``, and its ``arguments`` if it is this package's own, else its ``identity``.

    Transforms made in the same way have equal identities; it is None for one that cannot be compared. Raises
    ValueError for arguments that make no transform.
    """

    name: str
    identity: str | None
    arguments: dict[str, Any] | None

    def __post_init__(self) -> None:
        """Fill in arguments that an older release did not have."""
        if self.arguments is not None:
            try:
                arguments = _arguments(_build(self.name, self.arguments))
            except (ShardprepError, TypeError, KeyError, AttributeError, OverflowError) as error:
                raise ValueError(f"its {self.name} cannot be made: {error}") from error
            object.__setattr__(self, "arguments", arguments)

    @classmethod
    def of(cls, transform: Transform, identity: str | None) -> Self:
        name = transform_name(transform)
        return cls(name, None, _arguments(transform)) if _is_own(transform) else cls(name, identity, None)

    def make(self) -> Transform:
        """Return the transform, made from its arguments. Raises UsageError without them."""
        if self.arguments is None or self.name not in OWN_TRANSFORMS:
            own = ", ".join(OWN_TRANSFORMS)
            advice = "give the same one (in a command --transform package.module:name)"
            raise UsageError(f"the run's transform, {self.name}, is not one of {own}; {advice}")
        return _build(self.name, self.arguments)

    @property
    def title(self) -> str:
        """The transform with its arguments, or the name, and the identity if it is known."""
        if self.arguments is not None:
            return repr(self.make())
        return f"{self.name} {self.identity}" if self.identity else self.name

    @property
    def is_random(self) -> bool:
        """Whether its results may depend on the seed."""
        if self.arguments is None:
            return True
        transform = _build(self.name, self.arguments)
        return not all(isinstance(nested, EvalTransform) for nested in _nested(transform) or (transform,))


def _is_own(value: object) -> bool:
    """Whether a value is a transform of this package, as are all transforms nested in it."""
    return OWN_TRANSFORMS.get(type(value).__name__) is type(value) and all(map(_is_own, _nested(value)))


def _nested(value: object) -> tuple[Transform, ...]:
    if isinstance(value, Views):
        return value.view_transforms
    return (value.transform,) if isinstance(value, Cut) else ()


def _arguments(transform: Any) -> dict[str, Any]:
    return {field.name: _to_plain(getattr(transform, field.name)) for field in fields(transform)}


def _to_plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_to_plain(part) for part in value]
    if isinstance(value, dict):  # as a list, since canonical JSON does not keep the order
        return {"named": [[name, _to_plain(part)] for name, part in value.items()]}
    if isinstance(value, ColorJitter):
        return asdict(value)
    if _is_own(value):
        return {"name": type(value).__name__, "arguments": _arguments(value)}
    return value.item() if hasattr(value, "item") else value


def _build(name: str, arguments: dict[str, Any]) -> Transform:
    return OWN_TRANSFORMS[name](**{key: _from_plain(value) for key, value in arguments.items()})


def _from_plain(value: Any) -> Any:
    """Undo _to_plain; lists become tuples."""
    if isinstance(value, list):
        return tuple(map(_from_plain, value))
    if not isinstance(value, dict):
        return value
    if "named" in value:
        return {name: _from_plain(part) for name, part in value["named"]}
    if "arguments" in value:
        return _build(value["name"], value["arguments"])
    return ColorJitter(**dict.fromkeys(ColorJitter.__dataclass_fields__, nan) | value)  # which refuses nan


_RANK_SETTINGS = ("batch_size", "rank", "world_size", "drop_last")  # which a resumed run may change
PLAN_SETTINGS = ("shuffle", "seed", *_RANK_SETTINGS)


@dataclass(frozen=True)
class RunCard(JsonRecord):
    """The options of a rank's run, as JSON, so that :meth:`.Loader.replay` works on any machine.

    Attributes:
        dataset: Root of the dataset's manifest.
        split: Its split.
        records: The chosen records, None for all.
        labels: The Loader's argument.
        columns: The named columns, None for all.
        weights: Weights of a collection's parts, None without.
        shuffle: The Loader's argument; its window counts records.
        seed: The Loader's argument.
        batch_size: The Loader's argument.
        rank: The Loader's argument.
        world_size: The Loader's argument.
        drop_last: The Loader's argument.
        on_bad_record: The Loader's argument.
        with_numbers: The Loader's argument.
        transform: Arguments or identity of the transform, None without.
        versions: Versions of the programs that determine the pixels, and for the ``decoder`` a digest of the
            pixels that it makes of some images. A replay uses the installed ones.
        without: The records omitted on purpose, None without.
        gaps: The Loader's argument, None without omitted records.
    """

    KIND: ClassVar[str] = "run card"
    ADVICE: ClassVar[str] = "write it with loader.card().save(path)"

    dataset: str
    split: str
    records: ChosenRecords | None
    labels: str
    columns: tuple[str, ...] | None
    weights: dict[str, float] | None
    shuffle: Shuffle | None
    seed: int
    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    on_bad_record: str
    with_numbers: bool
    transform: TransformCard | None
    versions: dict[str, str]
    without: ChosenRecords | None = None
    gaps: str | None = None

    def __post_init__(self) -> None:
        if self.gaps not in ((None,) if self.without is None else ("close", "keep")):
            raise ValueError(f"its gaps are {self.gaps!r}")
        if self.batch_size < 1 or not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"it has rank {self.rank} of {self.world_size}, and batches of {self.batch_size}"
            )

    def options(self, **given: Any) -> dict[str, Any]:
        """Return the arguments of this run's Loader, except the path of the dataset; some may be ``given``.

        Raises UsageError for a transform that is not this package's own, and for chosen records that the
        card does not list, unless they are given.
        """
        plain = ("labels", "columns", "weights", *PLAN_SETTINGS, "on_bad_record", "with_numbers")
        options = {name: getattr(self, name) for name in plain} | given
        if "transform" not in given:
            options["transform"] = self.transform.make() if self.transform else None
        if "records" not in given:
            options["records"] = self.records.require_numbers("subset") if self.records else None
        if self.without and "without" not in given:
            options["without"] = self.without.require_numbers("without")
        return options | ({"gaps": self.gaps or "close"} if "without" in options else {})

    def without_numbers(self) -> RunCard:
        """Return a card of bounded size, without the numbers of chosen and omitted records."""
        records, without = (each and replace(each, numbers=None) for each in (self.records, self.without))
        return replace(self, records=records, without=without)


def transform_name(transform: object) -> str:
    return str(getattr(transform, "__name__", type(transform).__name__))


Differences = dict[str, tuple[str, str]]
"""Settings that differ: name to both values, as text."""

DECIDING_SETTINGS: dict[str, tuple[str, ...]] = {
    "dataset": ("dataset",),
    "order": ("records", "without", "gaps", "weights", *PLAN_SETTINGS),
    "labels": ("labels",),
    "columns": ("columns", "with_numbers"),
    "augmentation": ("transform", "seed"),
    "pixels": ("transform", "seed", "versions"),
}
_shared = (name for name in DECIDING_SETTINGS["order"] if name not in _RANK_SETTINGS)
SHARED_SETTINGS = ("dataset", "split", *_shared, "labels")
"""The settings that are the same in all logs of a run."""


def differences(one: RunCard, other: RunCard, *, names: Iterable[str] = ()) -> Differences:
    """Return the settings in which the runs differ: of these ``names``, or all, also versions of programs."""
    names = names or dict.fromkeys([*chain.from_iterable(DECIDING_SETTINGS.values()), "on_bad_record"])
    return {name: texts for name in names if (texts := _setting_texts(name, one, other))}


def deciding_differences(kind: str, one: RunCard, other: RunCard) -> Differences:
    """Return the differing settings that determine this kind; the seed only if something is random."""
    settings = differences(one, other, names=DECIDING_SETTINGS[kind])
    is_random = any(
        card.shuffle if kind == "order" else card.transform and card.transform.is_random
        for card in (one, other)
    )
    if not is_random:
        settings.pop("seed", None)
    return settings


def _setting_texts(name: str, one: RunCard, other: RunCard) -> tuple[str, str] | None:
    """Return both values of a setting, or None if they are equal."""
    if name == "transform":
        return compare_transforms(one.transform, other.transform)
    values = [card.without_numbers().to_json().get(name) for card in (one, other)]
    first, second = (each if isinstance(each, str) else json.dumps(each, sort_keys=True) for each in values)
    return None if first == second else (first, second)


def compare_transforms(one: TransformCard | None, other: TransformCard | None) -> tuple[str, str] | None:
    """Return both transforms as text, with their arguments or identities; None if they are equal."""
    if one is None or other is None:
        return None if one is other else (one.title if one else "none", other.title if other else "none")
    unknown = None in (one.identity, other.identity)
    same = (one.name, one.arguments) == (other.name, other.arguments)
    return None if same and (unknown or one.identity == other.identity) else (one.title, other.title)


TRANSFORM_ADVICE = 'continue with this one by load_state_dict(state, transform="changed")'
TransformRule = Literal["same", "changed"]
"""Whether a state may be loaded only for the same transform as before, or for any."""


def describe_transform(transform: Transform) -> dict[str, Any]:
    """Return JSON values that are equal for transforms made in the same way, in any process.

    For this package's transforms they are the arguments; for others the name, and digests of the transform's
    values and of its code, which is comparable within one version of Python. Digests are None for a transform
    that cannot be compared.
    """
    card = TransformCard.of(transform, transform_digest(transform, CodeType, LibraryVersion))
    code = None if card.arguments else transform_digest(transform, LibraryVersion)
    return asdict(card) | {"code": code, "python": ".".join(platform.python_version_tuple()[:2])}


def check_transforms(saved: object, own: Sequence[dict[str, Any] | None], transform: TransformRule) -> None:
    """Raise UsageError if a state's transforms differ from those used here, unless they may be "changed".

    Both are lists of results of :func:`describe_transform`, with None for no transform.
    """
    check_choice("transform", transform, ("same", "changed"))
    if transform == "changed":
        return
    try:
        changes = [_transform_difference(*each) for each in zip_longest(saved, own)]  # type: ignore[call-overload]
    except (TypeError, KeyError, ValueError) as error:
        raise UsageError(
            f"the state's transform does not exist in this version ({error}); {TRANSFORM_ADVICE}"
        ) from error
    for one, other in filter(None, changes):
        raise UsageError(
            f"the state is from another transform: it has {one} where this one has {other}; use the same "
            f"one, or {TRANSFORM_ADVICE}"
        )


def _transform_difference(saved: Any, own: Any) -> tuple[str, str] | None:
    one, other = (parse_as(TransformCard | None, each) for each in (saved, own))
    difference = compare_transforms(*(each and replace(each, identity=None) for each in (one, other)))
    if difference or one is None or other is None:
        return difference
    if compare_transforms(one, other):
        return f"{one.name} with other values", other.name
    has_code = saved["python"] == own["python"] and saved["code"] and own["code"]
    return (f"{one.name} with other code", other.name) if has_code and saved["code"] != own["code"] else None


def transform_digest(transform: Transform, *without: type) -> str | None:
    """Return a transform's digest; None if it cannot be compared."""
    try:
        return digest_of(transform, without=without)
    except (UsageError, RecursionError):
        return None
