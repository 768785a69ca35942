"""Damage to the parts of a frame on its way."""

import random
from typing import Any

Parts = list[bytes]


def wired(parts: Any) -> Parts:
    """Return the parts as they are received: as copies."""
    return [bytes(part) for part in parts]


def flip_a_bit(frame: Parts, chance: random.Random) -> Parts:
    place = chance.randrange(len(frame))
    data = bytearray(frame[place] or b"\0")
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return [*frame[:place], bytes(data), *frame[place + 1 :]]


def damage_the_parts(frame: Parts, chance: random.Random) -> Parts:
    """Cut or lengthen a part, leave one out, add or repeat one, or exchange two."""
    place, parts = chance.randrange(len(frame)), list(frame)
    how = chance.choice(["cut", "lengthen", "leave out", "add", "exchange"])
    if how == "cut":
        parts[place] = parts[place][: chance.randrange(len(parts[place]))]
    elif how == "lengthen":
        at = chance.randint(0, len(parts[place]))
        parts[place] = parts[place][:at] + chance.randbytes(chance.randrange(1, 30)) + parts[place][at:]
    elif how == "leave out":
        parts.pop(place)
    elif how == "add":
        parts.insert(place + 1, chance.choice([parts[place], chance.randbytes(chance.randrange(40))]))
    else:
        parts[place], parts[place - 1] = parts[place - 1], parts[place]
    return parts
