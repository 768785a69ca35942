"""Running what a flow describes: its passes, what is known of them, and what is kept between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any, Self

from ...formats.errors import UsageError
from .length import Length
from .measure import FlowSpeed, measure
from .node import Node
from .running import Kept, Pass
from .whole import whole


class Pipeline:
    """Iterating it runs the next pass of ``node``. See :class:`.Flow`, which adds how nodes are made."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._kept = Kept()
        self._next_pass = 0

    def peek(self, items: int = 1) -> list[Any]:
        """The first items of pass 0, which is ended then."""
        count = whole(items, "the number of items", least=0)
        with closing(self.at_pass(0)) as found:  # type: ignore[type-var]
            return [item for _, item in zip(range(count), found, strict=False)]

    def measure(self, *, seconds: float = 5.0) -> FlowSpeed:
        """How fast the flow delivers, to a consumer that does nothing: items/s, MB/s, times between items."""
        return measure(self, seconds=seconds)

    def __iter__(self) -> Iterator[Any]:
        """Begin the next pass."""
        number, self._next_pass = self._next_pass, self._next_pass + 1
        return self.at_pass(number)

    def at_pass(self, number: int) -> Iterator[Any]:
        """Begin this pass. Raises UsageError unless 0 <= number < 2**63."""
        return self._node.run(self._pass(number))

    def _pass(self, number: int) -> Pass:
        if whole(number, "the number of a pass", least=0) >= 1 << 63:
            raise UsageError(f"the number of a pass must be below 2**63, not {number}")
        return Pass(int(number), self._kept)

    @property
    def can_pick(self) -> bool:
        """Whether :meth:`pick` works: a source with numbers, and steps that keep them."""
        return self._node.can_pick

    def pick(self, pass_number: int, numbers: Iterable[int]) -> Iterator[Any]:
        """The items that this pass yields at these places, in the order asked for; UsageError where :attr:`can_pick` is not.

        ``numbers`` are drawn some items ahead of what is yielded.
        """
        if not isinstance(numbers, Iterable):
            raise UsageError(f"items are picked by several numbers: give a list, not {numbers!r}")
        return self._node.pick(self._pass(pass_number), numbers)

    @property
    def length(self) -> Length:
        """How many items each pass has: exactly, at most, unknown or infinite."""
        return self._node.length

    def __len__(self) -> int:
        """How many items each pass has. TypeError where that is not known exactly."""
        if not self.length.is_exact:
            raise TypeError(
                f"this flow's length is {self.length}; flow.take(n) or an exact source gives it one"
            )
        return self.length.items

    def __bool__(self) -> bool:
        return True

    @property
    def batches_never_change(self) -> bool:
        """Whether nobody writes again to what this flow has yielded, so that it need not be copied."""
        return self._node.never_change

    def close(self) -> None:
        """End worker processes and forget caches; the next pass makes new ones. Idempotent.

        What other flows keep, that this one was made from or that were made of it, is theirs.
        """
        kept, self._kept = self._kept, Kept()
        kept.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._node,)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.length} items, ending in {type(self._node).__name__}>"
