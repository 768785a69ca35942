"""What the parts of a collection must agree in."""

from __future__ import annotations

from collections.abc import Sequence

from shardprep.formats.dataset.manifest import Manifest


def differences(names: Sequence[str], manifests: Sequence[Manifest]) -> str:
    """Return the first difference between parts in what training needs, in words; empty for none.

    Classes and their ids, the schemas of columns, and whether records have images must be equal.
    """
    for name, manifest in zip(names[1:], manifests[1:], strict=True):
        if found := _difference(manifests[0], manifest):
            return f"{names[0]} and {name} cannot be one collection: {found}"
    return ""


def _difference(one: Manifest, other: Manifest) -> str:
    if one.labels.classes != other.labels.classes and (found := _class_difference(one, other)):
        return found
    if one.has_images != other.has_images:
        return "one has images, and the other none"
    mine, theirs = tuple(one.schema), tuple(other.schema)
    for first, second in zip(mine, theirs, strict=False):
        if first != second:
            return (
                f"the column {first.name} ({first.kind}) stands where {second.name} ({second.kind}) does"
                + (", with other classes" if (first.name, first.kind) == (second.name, second.kind) else "")
            )
    if len(mine) != len(theirs):
        return f"the column {max(mine, theirs, key=len)[min(len(mine), len(theirs))].name} is in one only"
    return ""


def _class_difference(one: Manifest, other: Manifest) -> str:
    mine = [(each.name, each.ilsvrc2012_id) for each in one.labels.classes]
    theirs = [(each.name, each.ilsvrc2012_id) for each in other.labels.classes]
    for label, (first, second) in enumerate(zip(mine, theirs, strict=False)):
        if first[0] != second[0]:
            return f"label {label} is {first[0]!r} in the one and {second[0]!r} in the other"
        if first[1] != second[1]:
            return f"the class {first[0]!r} has the ILSVRC2012_ID {first[1]} in the one and {second[1]} in the other"
    if len(mine) != len(theirs):
        return f"one has {one.labels.counted}, and the other {other.labels.counted}"
    return ""
