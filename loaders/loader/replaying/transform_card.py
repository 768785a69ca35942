"""A transform as a run card has it: enough to make it again, or to recognise it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from shardprep.formats.errors import ShardprepError, UsageError
from shardprep.loaders.transforms.augment import ColorJitter
from shardprep.loaders.transforms.contract import Transform
from shardprep.loaders.transforms.transforms import EvalTransform, TrainTransform

OWN: dict[str, Callable[..., Transform]] = {kind.__name__: kind for kind in (TrainTransform, EvalTransform)}


@dataclass(frozen=True)
class TransformCard:
    """A transform: its ``name``, and, of this package's own, its ``arguments``; of others, its ``identity``.

    The identity is the loader's: equal for transforms that are made in the same way. It is None for one that
    cannot be compared.
    """

    name: str
    identity: str | None
    arguments: dict[str, Any] | None

    @classmethod
    def of(cls, transform: Transform, identity: str | None) -> Self:
        """Return the card of a transform."""
        name = str(getattr(transform, "__name__", type(transform).__name__))
        is_own = OWN.get(name) is type(transform)
        return cls(name, None, _arguments(transform)) if is_own else cls(name, identity, None)

    def made(self) -> Transform:
        """Return the transform made of the arguments. Raises UsageError without them."""
        if self.arguments is None or self.name not in OWN:
            raise UsageError(
                f"the run's transform, {self.name}, is not one of {', '.join(OWN)}; give the same one"
            )
        return _made(self.name, self.arguments)

    @property
    def title(self) -> str:
        """The name, and the identity where it is known."""
        return f"{self.name} {self.identity}" if self.identity else self.name

    @property
    def is_random(self) -> bool:
        """Whether the seed may decide what it makes."""
        return self.name != EvalTransform.__name__ or self.arguments is None

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the card that ``to_json`` described. Raises ValueError for other values."""
        name, identity, arguments = (value[field.name] for field in fields(cls))
        if not isinstance(name, str) or not isinstance(identity, str | None):
            raise ValueError(f"{value!r} is not a transform")
        if arguments is not None:
            try:
                arguments = _arguments(_made(name, arguments))
            except (ShardprepError, TypeError, KeyError, AttributeError, OverflowError) as error:
                raise ValueError(f"its {name} cannot be made: {error}") from error
        return cls(name, identity, arguments)


def _arguments(transform: Any) -> dict[str, Any]:
    """The arguments of a transform, as JSON has them."""
    values = {field.name: getattr(transform, field.name) for field in fields(transform)}
    return {
        name: asdict(value) if isinstance(value, ColorJitter) else _plain(value)
        for name, value in values.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value.item() if hasattr(value, "item") else value


def _made(name: str, arguments: dict[str, Any]) -> Transform:
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    if isinstance(jitter := given.get("color_jitter"), dict):
        given["color_jitter"] = ColorJitter(**jitter)
    return OWN[name](**given)
