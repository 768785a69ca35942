"""Several views of each image, read and decoded once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.images.crop_ready import Crop
from shardprep.formats.runtime.owners import cached_property
from shardprep.formats.runtime.progress import is_sequence
from shardprep.loaders.transforms.contract import (
    IMAGE,
    Array,
    ArraySpec,
    Transform,
    TransformInput,
    fill_rows,
    outputs_of,
)
from shardprep.loaders.transforms.decode import EncodedImage, Orientation, Reduction
from shardprep.loaders.transforms.geometry import ShownPart
from shardprep.loaders.transforms.transforms import ImageTransform
from shardprep.loaders.transforms.wrapper import WrappedTransform


class _View(NamedTuple):
    """A view's ``transform``, its ``arrays`` among the outputs, and its place in each of them."""

    transform: Transform
    arrays: slice
    place: tuple[Any, ...]


@dataclass(frozen=True)
class Views:
    """Several views of each image, for self-supervised training or repeated augmentation.

    A record is read once. Images are decoded once for all views of :class:`TrainTransform` and
    :class:`EvalTransform`, also as the ``crop`` of another library's transforms: a crop-ready image in the
    rectangle around the crops, or in each crop if that is fewer pixels; any other image whole. Views at a
    fraction of the size share one more decode at that fraction. Other transforms decode for themselves.

    View ``v`` of a record draws from its own stream, that of (seed, epoch, record, v): its arrays are bit for
    bit those of its transform alone with these random numbers. View 0 has the numbers of a loader with that
    transform alone. Thread-safe, and picklable if the transforms are.

    Args:
        transforms: A list with the transform of each view: neighbours with equal outputs become one array of
            the batch, [B, views, height, width, 3]; several such arrays are named "image_0", "image_1". Or a
            dict of names to transforms or lists of them: each becomes an array of that name, with an axis of
            views for lists only. Masks and boxes follow their images, as "mask_1" or "name_mask". Each
            transform must declare its ``outputs``.

    Raises:
        UsageError: There are no transforms, a transform declares no outputs or is a Views, or those of one
            name have different outputs.
    """

    transforms: Sequence[Transform] | Mapping[str, Transform | Sequence[Transform]]

    def __post_init__(self) -> None:
        given = self.transforms
        if not (is_sequence(given) or isinstance(given, Mapping)) or not given:
            raise UsageError(f"Views takes a list of transforms, or a dict of names to them, not {given!r}")
        if isinstance(given, Mapping):
            transforms: Any = {
                name: tuple(views) if is_sequence(views) else views for name, views in given.items()
            }
            if not all(isinstance(name, str) and name for name in given) or () in transforms.values():
                raise UsageError(f"each view needs a name, and each name a transform, not {given!r}")
        else:
            transforms = tuple(given)
        object.__setattr__(self, "transforms", transforms)
        self.outputs  # noqa: B018 - raises for transforms that do not fit together

    @cached_property
    def view_transforms(self) -> tuple[Transform, ...]:
        return tuple(view.transform for view in self._structure[1])

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        """The specs of the arrays, grouped by views."""
        return self._structure[0]

    @cached_property
    def _structure(self) -> tuple[tuple[ArraySpec, ...], tuple[_View, ...]]:
        """The outputs, and the views in their order."""
        given: Any = self.transforms
        if isinstance(given, dict):
            named_views = [(name, f"{name}_", "", views) for name, views in given.items()]
        else:
            runs = [tuple(run) for _, run in groupby(given, key=_required_outputs)]
            ends = [f"_{number}" for number in range(len(runs))] if runs[1:] else [""]
            named_views = [(IMAGE + end, "", end, run) for end, run in zip(ends, runs, strict=True)]
        outputs, views = list[ArraySpec](), list[_View]()
        for name, before, behind, own in named_views:
            is_stacked = isinstance(own, tuple)
            transforms = own if is_stacked else (own,)
            specs, *others = map(_required_outputs, transforms)
            if any(other != specs for other in others):
                raise UsageError(f"the views {name!r} have different outputs: give them different names")
            arrays = slice(len(outputs), len(outputs) + len(specs))
            for number, transform in enumerate(transforms):
                views.append(_View(transform, arrays, (number, ...) if is_stacked else (...,)))
            for spec in specs:
                title = name if spec.name == IMAGE else f"{before}{spec.name}{behind}"
                shape = (len(transforms), *spec.shape) if is_stacked else spec.shape
                outputs.append(ArraySpec(title, shape, spec.dtype))
        names = [spec.name for spec in outputs]
        if len(set(names)) != len(names):
            raise UsageError(f"the arrays of views must have different names, not {', '.join(names)}")
        return tuple(outputs), tuple(views)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Any:
        """Return new arrays of :attr:`outputs`: one array, or a tuple of several."""
        arrays = tuple(np.empty(spec.shape, spec.dtype) for spec in self.outputs)
        self.fill(record, rng, *arrays)
        return arrays if len(arrays) > 1 else arrays[0]

    def fill(self, record: TransformInput, rng: np.random.Generator, *arrays: Array) -> None:
        """Write :attr:`outputs` to C-contiguous arrays."""
        images: dict[Orientation, EncodedImage] = {}
        crops: dict[tuple[Orientation, Reduction], list[Crop]] = {}
        choices: list[Any] = []
        streams = _Streams(rng)
        for number, (transform, own, place) in enumerate(self._structure[1]):
            random, rows = streams.of(number), tuple(array[place] for array in arrays[own])
            cropping = transform.crop if isinstance(transform, WrappedTransform) else transform
            if not isinstance(cropping, ImageTransform):
                fill_rows(transform, record, random, rows)
                continue
            orientation = cropping.orientation
            if orientation not in images:
                images[orientation] = cropping.open_image(record)
            choice = cropping.choose(images[orientation], random)
            crops.setdefault((orientation, choice.reduction), []).append(choice.part)
            choices.append((transform, images[orientation], choice, random.bit_generator.state, rows))
        for (orientation, reduction), parts in crops.items():
            images[orientation].decode_together(parts, reduction=reduction)
        for transform, image, choice, state, rows in choices:
            transform.render(record, image, choice, streams.at(state), *rows)

    def shown(self, record: TransformInput, rng: np.random.Generator) -> tuple[ShownPart | None, ...]:
        """Return the part of the image that each view shows, None for a transform without ``shown``."""
        streams = _Streams(rng)
        calls = (getattr(transform, "shown", None) for transform in self.view_transforms)
        return tuple(call(record, streams.of(view)) if call else None for view, call in enumerate(calls))


def _required_outputs(transform: Transform) -> tuple[ArraySpec, ...]:
    specs = outputs_of(transform)
    if isinstance(transform, Views) or not specs:
        raise UsageError(
            f"a view needs a transform that declares its outputs, as TrainTransform(224) does, not {transform!r}: "
            "give outputs=(ArraySpec('image', (224, 224, 3), 'uint8'),)"
        )
    return specs


class _Streams:
    """The random streams of the views, all from one generator, which moves between them."""

    def __init__(self, rng: np.random.Generator) -> None:
        if not isinstance(rng.bit_generator, np.random.Philox):
            rng = np.random.Generator(np.random.Philox(key=rng.integers(1 << 64, size=2, dtype=np.uint64)))
        self._rng = rng
        self._bits = rng.bit_generator
        self._start = self._bits.state

    def of(self, view: int) -> np.random.Generator:
        """Return the generator at the start of a view's stream; view 0 starts where the generator was."""
        if view == 0:
            return self.at(self._start)
        words: Any = self._start["state"]
        counter = words["counter"].copy()
        counter[1] += np.uint64(view)  # 2**64 blocks after the previous view's
        return self.at(
            {**self._start, "state": {**words, "counter": counter}, "buffer_pos": 4, "has_uint32": 0}
        )

    def at(self, state: Any) -> np.random.Generator:
        self._bits.state = state
        return self._rng
