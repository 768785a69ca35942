"""Progress of long work, the bars that show it, and the counts and sizes that users read and write."""

from __future__ import annotations

import math
import operator
import re
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from fractions import Fraction
from functools import cache
from inspect import signature
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, SupportsIndex, TypeGuard

from shardprep.formats.errors import UsageError, printable

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{infix}".upper(): base ** (power + 1)
    for infix, base in (("B", 1000), ("iB", 1024), ("", 1024))
    for power, prefix in enumerate("KMGT")
}


def parse_bytes(text: str) -> int:
    """Parse a size such as "256MiB", "1GB", "64K" (K, M, G and T alone are powers of 1024) or "4096".

    Ignores case, and drops fractions of a byte. Raises ValueError for any other text.

    >>> parse_bytes("256MiB"), parse_bytes("1.5 GB"), parse_bytes("64K")
    (268435456, 1500000000, 65536)
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise ValueError(f"{text!r} is not a size such as 256MiB")
    return int(Fraction(match[1]) * UNITS[match[2].upper()])


def byte_count(value: object, *, of: str) -> int:
    """Return a whole number of at least 1, or the bytes of a text such as ``"2GiB"`` or ``"1.5 GB"``.

    The text's unit must end in B, because a bare number is ambiguous. Raises UsageError, which names the
    quantity ``of``, for any other value.
    """
    if isinstance(value, SupportsIndex):
        return check_int(value, of, least=1)
    with suppress(ValueError):
        if isinstance(value, str) and value.endswith("B") and (number := parse_bytes(value)):
            return number
    raise UsageError(f"{of} must be a whole number or a size such as '2GiB', not {value!r}")


def check_int(value: Any, name: str, *, least: int, most: int = sys.maxsize) -> int:
    """Return a Python or numpy integer as an int. Raises UsageError for anything else, even booleans."""
    number = least - 1
    with suppress(TypeError):
        number = operator.index(value)
    if isinstance(value, bool) or not least <= number <= most:
        limits = f"at least {least}" if number < least and most == sys.maxsize else f"{least} to {most}"
        raise UsageError(f"{name} must be a whole number, {limits}, not {value!r}")
    return number


def check_flags(**flags: object) -> None:
    """Raise UsageError for a value that is not True or False, such as "False", which would count as True."""
    for name, value in flags.items():
        if value not in (True, False):
            raise UsageError(f"{name} must be True or False, not {value!r}")


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether the value is a list, a tuple or a sequence such as OmegaConf's, but not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_number(value: object) -> TypeGuard[float]:
    """Whether the value is a finite number of Python or NumPy, not a bool."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def check_seconds(value: object, name: str, *, above: float | None = None) -> float:
    """Return the value as a float: at least 0, or more than ``above``. Raises UsageError."""
    if is_number(value) and (value >= 0 if above is None else value > above):
        return float(value)
    least = "0 or more" if above is None else f"more than {above:g}"
    raise UsageError(f"{name} must be a number of seconds, {least}, not {value!r}")


def check_seed(value: object) -> int:
    """Return the value as a seed: an int below 2**64. Raises UsageError."""
    return check_int(value, "a seed", least=0, most=(1 << 64) - 1)


def accepts_arguments(call: Callable[..., Any], arguments: int) -> bool:
    """Whether the callable takes this many arguments; True if it has no known signature."""
    try:
        signature(call, follow_wrapped=False).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        pass
    return True


def format_size(count: float) -> str:
    """Format a number of bytes in decimal units.

    >>> format_size(999), format_size(999.6), format_size(123456), format_size(147.9e12)
    ('999 B', '1.0 KB', '123.5 KB', '147.9 TB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if count < (999.5 if unit == "B" else 999.95):
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_number(value: float) -> str:
    """Return a number with separators; a fraction has at most three significant digits.

    >>> format_number(1281167), format_number(0.12345), format_number(12.0), format_number(999.7)
    ('1,281,167', '0.123', '12', '1,000')
    """
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def count_of(number: int, noun: str) -> str:
    """Format a count with its noun.

    >>> count_of(1, "shard"), count_of(1281167, "image"), count_of(2, "class"), count_of(2, "epoch")
    ('1 shard', '1,281,167 images', '2 classes', '2 epochs')
    """
    plural = noun + ("es" if noun.endswith(("s", "tch")) else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def records_of(number: int, *, has_images: bool, has_labels: bool) -> str:
    """Format a number of records, naming missing images and labels.

    >>> records_of(300, has_images=True, has_labels=True), records_of(1, has_images=False, has_labels=True)
    ('300 images', '1 record without images')
    """
    lacks = [name for name, has in (("images", has_images), ("labels", has_labels)) if not has]
    without = f" without {' or '.join(lacks)}" if lacks else ""
    return count_of(number, "image" if has_images else "record") + without


def round_step(least: float) -> float:
    """Round a positive number up to 1, 2, 5 or 10 times a power of ten.

    >>> round_step(3), round_step(0.5), round_step(70)
    (5.0, 0.5, 100.0)
    """
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * (1 - 1e-9))


if TYPE_CHECKING:
    from tqdm import tqdm

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} {unit}, {elapsed}<{remaining}{postfix}"
SHAPES = (BAR, BAR.removesuffix("{postfix}"), "{desc}: {percentage:3.0f}%|{bar}| {remaining} left")
UNCOUNTED_BAR = "{desc}: {n_fmt} {unit}, {elapsed}{postfix}"


class Progress(Protocol):
    """Receives the progress of a conversion, repair or verification; shows nothing by default.

    Its methods are called from one thread, and must not raise.
    """

    def note(self, text: str) -> None:
        """Show a line to the user."""
        return

    def task(self, title: str, *, records: int, size: int) -> AbstractContextManager[object]:
        """Start a task of this many records and bytes (``size``), which ends with the context.

        A task without records, such as a download, consists of bytes only.
        """
        return nullcontext()

    def at(self, records: int, size: int) -> None:
        """Set the number of records and bytes (``size``) done."""
        return


class NoProgress(Progress):
    """A progress that is not shown."""


WINDOW_S = 60.0  # of the rates
MIN_S = 1.0  # a rate over less time would show how long processes take to start


class Pace:
    """Progress and rates of a task, counted in records, or in bytes if it has no records."""

    def __init__(self, records: int, size: int, noun: str = "images") -> None:
        self.total, self.counts_bytes = records or size, size > 0 and not records
        self._noun = noun
        self._samples = deque([(time.monotonic(), 0, 0)])  # of the last minute: time, count, bytes

    def at(self, records: int, size: int) -> None:
        now, count = time.monotonic(), size if self.counts_bytes else records
        if len(self._samples) > 1 and self._samples[-2][1:] == self._samples[-1][1:] == (count, size):
            self._samples.pop()  # a time without progress has two samples: its start and its end
        self._samples.append((now, count, size))
        while len(self._samples) > 2 and self._samples[1][0] < now - WINDOW_S:
            self._samples.popleft()

    @property
    def done(self) -> int:
        """The number of records or bytes done, at most a known ``total``."""
        return min(self._samples[-1][1], self.total or sys.maxsize)

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 1.0

    def rates(self) -> list[str]:
        """Return images/s, and MB/s of a task with bytes; empty while they are unknown."""
        rate, bytes_per_second = self._rates()
        texts = [f"{rate:,.0f} {self._noun}/s"] if rate and not self.counts_bytes else []
        return [*texts, f"{bytes_per_second / 1e6:,.0f} MB/s"] if bytes_per_second >= 5e5 else texts

    def seconds_left(self) -> float:
        """Return the remaining time in seconds; 0 while it is unknown, and at the end."""
        missing, (rate, _) = self.total - self.done, self._rates()
        return missing / rate if rate else 0.0

    def _rates(self) -> tuple[float, float]:
        (began, count, size), (now, last_count, last_size) = self._samples[0], self._samples[-1]
        if (seconds := now - began) < MIN_S:
            return 0.0, 0.0
        return (last_count - count) / seconds, (last_size - size) / seconds


class BarProgress:
    """A progress bar on stderr or below a notebook cell, removed when the task ends.

    Counts records, which it calls ``noun``, or bytes in a task without records. If neither total is known, it
    shows only the count. Shows nothing unless it is ``visible``.
    """

    def __init__(self, noun: str = "images", *, visible: bool = True) -> None:
        self._noun, self._is_visible = noun, visible
        self._bar: tqdm[Any] | None = None
        self._pace = Pace(0, 0)

    def note(self, text: str) -> None:
        if self._is_visible:
            with suppress(OSError):  # the terminal may be gone; tqdm itself ignores that, but not here
                bar_class().write(printable(text), file=None if in_notebook() else sys.stderr)

    @contextmanager
    def task(self, title: str, *, records: int, size: int) -> Iterator[None]:
        self._pace = pace = Pace(records, size, self._noun)
        unit = {"unit": "bytes", "unit_scale": True} if pace.counts_bytes else {"unit": self._noun}
        with bar_class()(
            total=pace.total or None,
            desc=printable(title),
            leave=False,
            bar_format=BAR if pace.total else UNCOUNTED_BAR,
            disable=not self._is_visible,
            dynamic_ncols=True,
            miniters=0,
            **unit,
        ) as self._bar:
            yield

    def at(self, records: int, size: int) -> None:
        if self._bar is not None and self._is_visible:
            self._pace.at(records, size)
            self._bar.set_postfix_str(", ".join(self._pace.rates()), refresh=False)
            self._bar.update(self._pace.done - self._bar.n)


def progress_or_bar(progress: Progress | None) -> Progress:
    """Return ``progress``, or by default a bar in a notebook, and no progress elsewhere."""
    if progress and not hasattr(progress, "task"):
        raise UsageError(f"progress must be a Progress, or None, not {progress!r}")
    return progress or (BarProgress() if in_notebook() else NoProgress())


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel, by the same test as ``tqdm.auto``."""
    return "ipykernel.zmqshell" in sys.modules


@cache
def bar_class() -> type[tqdm[Any]]:
    """Return the class of bars: widgets in a notebook with ipywidgets, otherwise lines of text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tqdm in a notebook; without ipywidgets it falls back to text
        from tqdm.autonotebook import tqdm  # imported late for start-up time
    return type("Bar", (FittingBar, tqdm), {})


class FittingBar:
    """Mixin of bars that leave out what does not fit into the terminal's width, as tqdm cuts numbers off.

    They have neither tqdm's lock in /dev/shm, which processes share, nor its monitoring thread.
    """

    monitor_interval = 0
    _lock = threading.RLock()
    format_dict: Any
    format_meter: Any

    def __str__(self) -> str:
        from tqdm.utils import disp_len  # imported late for start-up time

        values = self.format_dict
        if values["ncols"] and values["bar_format"] == BAR:
            for values["bar_format"] in SHAPES:
                if disp_len(self.format_meter(**{**values, "ncols": None})) <= values["ncols"]:
                    break
        return str(self.format_meter(**values))


def report_shards(progress: Progress, done: int, total: int) -> None:
    """Pass the number of shards done to a progress that takes it, in a method ``shards(done, total)``."""
    if hasattr(progress, "shards"):
        progress.shards(done, total)
