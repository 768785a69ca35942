"""Text from files, such as names, made safe to show in one line."""

from __future__ import annotations

MOST_CHARACTERS = 1000  # two fit a line of a log; the longest path of most systems has 4,096 bytes


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    r"""Return ``text`` on one line, in at most ``most`` characters. Idempotent.

    Characters that are not printable are escaped as in a string literal: line breaks, control characters,
    lone surrogates, changes of direction and invisible characters. In a longer text "…" replaces the
    middle, so that both ends are shown: the place of an error, and what to do.

    >>> printable("n01440764\x1b[2J\n"), printable("0123456789", 5)
    ('n01440764\\x1b[2J\\n', '01…89')
    """
    if len(text) <= most:
        shown = _escaped(text)
        if len(shown) <= most:
            return shown
    kept = most - 1
    return f"{_escaped(text[:most])[: kept // 2]}…{_escaped(text[-most:])[-(kept - kept // 2) :]}"


def printable_lines(text: str) -> str:
    """Return ``text`` with each of its lines made printable."""
    return "\n".join(map(printable, text.splitlines()))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
