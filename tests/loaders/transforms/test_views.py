"""Views and cuts: each view is bit for bit its transform alone, and so is a cut that is finished."""

import copy
import json
from collections import UserDict, UserList
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import BadImage, UsageError
from shardprep.formats.images.header import jpeg_size, marker_segments
from shardprep.loaders import (
    ArraySpec,
    ColorJitter,
    Cut,
    EvalTransform,
    Flow,
    TrainTransform,
    Views,
    decode_rgb,
)
from shardprep.loaders.loader.replay import pictures_of
from shardprep.loaders.loader.run_card import RunCard, TransformCard
from shardprep.loaders.order.rng import RecordRandom, keyed_bits
from shardprep.loaders.transforms.decode import EncodedImage
from support.loaded import assert_same, crops_on, epoch_of
from support.transform_examples import examples

SEED, EPOCH, RECORD = 7, 3, 11


def own_stream(view: int) -> np.random.Generator:
    """The random numbers of a view, written down once more."""
    counter = np.array([0, view, RECORD, 3], np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([SEED, EPOCH], np.uint64), counter=counter))


def patch(record: Any, rng: np.random.Generator) -> Any:
    """A transform of a user, which decodes for itself."""
    return decode_rgb(record)[:2, :2] + rng.integers(0, 9, dtype=np.uint8)


class Patch:
    outputs = (ArraySpec("image", (2, 2, 3), "uint8"),)

    def __call__(self, record: Any, rng: np.random.Generator) -> Any:
        return patch(record, rng)


shared = {
    "layout": st.sampled_from(["HWC", "CHW"]),
    "dtype": st.sampled_from(["uint8", "float32"]),
    "interpolation": st.sampled_from(["auto", "auto", "linear", "area"]),
    "orientation": st.sampled_from(["ignore", "apply"]),
    "masks": st.sampled_from([(), ("mask",)]),
    "boxes": st.sampled_from([None, "boxes"]),
}
crops = st.builds(
    TrainTransform,
    st.sampled_from([8, 24, (40, 32), 96]),
    **shared,
    scale=st.sampled_from([(0.02, 0.1), (0.05, 0.32), (0.3, 1.0)]),
    color_jitter=st.sampled_from([None, ColorJitter()]),
    lighting=st.sampled_from([None, 0.1]),
)
centres = st.builds(EvalTransform, st.sampled_from([8, 48]), resize=st.sampled_from([48, 64]), **shared)
transforms = st.lists(crops | crops | centres | st.builds(Patch), min_size=1, max_size=6)


@given(
    transforms=transforms,
    kind=st.sampled_from(["crop-ready", "crop-ready", "plain", "turned", "png", "cmyk"]),
)
@settings(max_examples=60)
def test_a_view_is_bit_for_bit_its_transform_alone(transforms, kind):
    record = examples()[kind]

    made = Views(transforms)(record, RecordRandom(SEED)(EPOCH, RECORD))

    arrays = iter(made if isinstance(made, tuple) else (made,))
    views = 0
    while views < len(transforms):
        group = [next(arrays) for _ in transforms[views].outputs]
        for row in range(len(group[0])):
            alone = transforms[views](record, own_stream(views))
            for array, one in zip(group, alone if isinstance(alone, tuple) else (alone,), strict=True):
                np.testing.assert_array_equal(array[row], one)
            views += 1
    assert next(arrays, None) is None


@given(transforms=st.lists(crops, min_size=1, max_size=6))
@settings(max_examples=25)
def test_all_views_of_a_scale_are_cut_from_at_most_as_many_pixels_as_alone(transforms):
    record, random = examples()["crop-ready"], RecordRandom(SEED)
    alone = [decoded(lambda t=t, v=v: t(record, own_stream(v))) for v, t in enumerate(transforms)]
    together = decoded(lambda: Views(transforms)(record, random(EPOCH, RECORD)))

    assert together.images <= sum(one.images for one in alone)
    assert together.pixels <= sum(one.pixels for one in alone) * 2  # cuts begin and end at segments


def test_a_plain_image_is_decoded_once_for_all_views() -> None:
    small = TrainTransform(96, scale=(0.05, 0.3), interpolation="linear")  # at full size
    views = Views([TrainTransform(224)] * 2 + [small] * 8)

    record = examples()["plain"]  # the first call decodes others

    assert decoded(lambda: views(record, RecordRandom(SEED)(EPOCH, RECORD))).images == 1


class Decoded(NamedTuple):
    images: int
    pixels: int


def decoded(call: Any) -> Decoded:
    """What is decoded during a call."""
    sizes = []

    def counted(image: EncodedImage, *arguments: Any) -> Any:
        pixels = given(image, *arguments)
        sizes.append(pixels.shape[0] * pixels.shape[1])
        return pixels

    given = EncodedImage._decode
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(EncodedImage, "_decode", counted)
        call()
    return Decoded(len(sizes), sum(sizes))


@pytest.mark.parametrize(
    "bits",
    [lambda: np.random.PCG64(5), lambda: keyed_bits(5 << 32 | 4 << 8 | 4, seed=1, epoch=2, item=3)],
    ids=["another generator", "an item of a flow"],
)
def test_views_repeat_and_differ_with_any_generator(bits: Any) -> None:
    views = Views([TrainTransform(24)] * 3)
    one, again = (views(examples()["plain"], np.random.Generator(bits())) for _ in range(2))

    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one[0], one[1])
    assert not np.array_equal(one[1], one[2])


def test_names_and_shapes_follow_the_form_in_which_views_are_given_also_as_by_omegaconf() -> None:
    big, small = TrainTransform(UserList([32] * 2), masks=UserList(["mask"])), TrainTransform(16)
    listed, mixed = Views([big, big]), Views([big, big, small])
    named = Views(UserDict({"weak": small, "strong": UserList([big] * 3)}))

    assert shapes(listed) == {"image": (2, 32, 32, 3), "mask": (2, 32, 32)}
    assert shapes(mixed) == {"image_0": (2, 32, 32, 3), "mask_0": (2, 32, 32), "image_1": (1, 16, 16, 3)}
    assert shapes(named) == {"weak": (16, 16, 3), "strong": (3, 32, 32, 3), "strong_mask": (3, 32, 32)}


def shapes(views: Views) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in views.outputs}


DINO = Views({"big": [TrainTransform(24)] * 2, "small": [TrainTransform(8, scale=(0.05, 0.32))] * 3})


def test_images_that_do_not_decode_are_named_by_their_keys() -> None:
    record, random = examples()["plain"], RecordRandom(SEED)(EPOCH, RECORD)
    made = Cut(TrainTransform(8))(record, random)

    for call in (
        lambda: Views([TrainTransform(8)] * 2)(record._replace(image=record.image[:200]), random),
        lambda: Cut(TrainTransform(8)).finish(made["jpeg"][:100], made["crop"], made["mirrored"], key="one"),
    ):
        with pytest.raises(BadImage) as raised:
            call()
        assert raised.value.key == "one"


def test_a_run_card_makes_views_and_cuts_again() -> None:
    jittered = TrainTransform(24, color_jitter=ColorJitter(0.1), masks=("mask",), std=np.full(3, 0.5))
    for made in (DINO, Views([jittered, EvalTransform(8)]), Cut(TrainTransform(24, scale=(0.1, 0.9)))):
        card = json.loads(json.dumps(asdict(TransformCard.of(made, "identity"))))
        assert TransformCard(**card).make() == made
    assert TransformCard.of(Views([Patch()]), "identity").arguments is None


def test_a_sheet_and_a_flow_show_the_views_side_by_side(lmdb_shards: Path) -> None:
    with crops_on(lmdb_shards, transform=Views([TrainTransform(24, dtype="float32")] * 3)) as loader:
        shown = loader.show_batch(most=2)
    with Flow.from_dataset(lmdb_shards) as source:
        (images, _), *_ = source.transform(Views([TrainTransform(8)] * 2), seed=1)

    assert decode_rgb(shown.images[0].image).shape == (24, 72, 3)
    assert images.shape == (2, 8, 8, 3)


def test_a_loader_delivers_views_in_workers_as_in_its_own_process_and_makes_them_again(
    lmdb_shards: Path,
) -> None:
    with crops_on(lmdb_shards, transform=DINO, workers=2) as loader:
        found = epoch_of(loader)
        again = loader.replay(0, 1)
        identity = loader.identity
    with crops_on(lmdb_shards, transform=copy.deepcopy(DINO), workers=0) as own:
        assert own.identity == identity
        assert_same(found, epoch_of(own))
    with crops_on(lmdb_shards, transform=TrainTransform(24), workers=0) as first:
        expected = epoch_of(first)

    big, small, *_ = found[0]
    assert (big.shape[1:], small.shape[1:]) == ((2, 24, 24, 3), (3, 8, 8, 3))
    np.testing.assert_array_equal(big[:, 0], expected[0][0])
    assert_same([again.batch], [found[1]])
    assert [len(record.views) for record in again] == [5] * len(again)
    assert len(again.records[0].to_json()["views"]) == 5
    assert again.records[0].to_json()["crop"] == again.records[0].to_json()["views"][0]["crop"]


def test_the_order_of_names_is_kept_and_counts(lmdb_shards: Path, tmp_path: Path) -> None:
    weak, strong = TrainTransform(8, scale=(0.9, 1)), TrainTransform(8, scale=(0.1, 0.2))
    with crops_on(lmdb_shards, transform=Views({"weak": weak, "strong": strong})) as loader:
        loader.card().save(tmp_path / "card.json")
        state, identity = loader.state_dict(), loader.identity
    assert list(RunCard.load(tmp_path / "card.json").options()["transform"].transforms) == ["weak", "strong"]
    with crops_on(lmdb_shards, transform=Views({"strong": strong, "weak": weak})) as other:
        assert other.identity != identity
        with pytest.raises(UsageError, match="transform"):
            other.load_state_dict(state)


def test_views_that_draw_nothing_do_not_depend_on_the_seed(lmdb_shards: Path) -> None:
    views = Views([EvalTransform(8, resize=8)] * 2)
    with (
        crops_on(lmdb_shards, transform=views, shuffle=None, seed=1) as one,
        crops_on(lmdb_shards, transform=views, shuffle=None, seed=2) as other,
    ):
        assert one.parting(other) is None


cut_crops = st.builds(
    TrainTransform,
    st.sampled_from([8, 24, (40, 32), 96]),
    layout=st.sampled_from(["HWC", "CHW"]),
    dtype=st.sampled_from(["uint8", "float32"]),
    interpolation=st.sampled_from(["auto", "auto", "linear", "area"]),
    scale=st.sampled_from([(0.02, 0.1), (0.05, 0.32), (0.3, 1.0)]),
)


@given(
    transform=cut_crops,
    kind=st.sampled_from(["crop-ready", "crop-ready", "plain", "png", "cmyk"]),
    record=st.integers(0, 99),
)
@settings(max_examples=80)
def test_a_cut_is_finished_to_the_pixels_of_the_transform(
    transform: TrainTransform, kind: str, record: int
) -> None:
    found = Cut(transform).finish(**Cut(transform)(examples()[kind], RecordRandom(1)(2, record)))

    np.testing.assert_array_equal(found, transform(examples()[kind], RecordRandom(1)(2, record)))


@given(transform=cut_crops, record=st.integers(0, 99))
@settings(max_examples=40)
def test_a_cut_of_a_crop_ready_image_is_a_small_baseline_jpeg_around_the_crop(
    transform: TrainTransform, record: int
) -> None:
    whole = examples()["crop-ready"]
    made = Cut(transform)(whole, RecordRandom(1)(2, record))
    jpeg, (x, y, width, height) = made["jpeg"], made["crop"].tolist()
    sides = jpeg_size(jpeg)
    shown = transform.shown(whole, RecordRandom(1)(2, record))

    assert sides
    assert 0 <= x < x + width <= sides[0]
    assert 0 <= y < y + height <= sides[1]
    assert len(jpeg) <= len(whole.image)
    assert jpeg.startswith(b"\xff\xd8")
    assert jpeg.endswith(b"\xff\xd9")
    assert {marker for marker, *_ in marker_segments(jpeg)} & {0xC0, 0xC1}
    pixels = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    expected = cv2.imdecode(np.frombuffer(whole.image, np.uint8), cv2.IMREAD_COLOR)
    assert pixels.shape == (sides[1], sides[0], 3)
    left, top = round(shown.x) // 8 * 8 + x % 8, round(shown.y) // 8 * 8 + y % 8
    np.testing.assert_array_equal(
        pixels[y : y + height, x : x + width], expected[top : top + height, left : left + width]
    )


def test_a_loader_delivers_cuts_that_are_finished_to_its_crops(lmdb_shards: Path) -> None:
    cut = Cut(TrainTransform(24))
    for workers in (0, 2):
        with crops_on(lmdb_shards, transform=cut, workers=workers) as loader:
            found = epoch_of(loader, 3)
            shown = loader.replay(0, 1)
        with crops_on(lmdb_shards, transform=cut.transform, workers=0) as plain:
            expected = epoch_of(plain, 3)
        for (values, labels, numbers), (pixels, *others) in zip(found, expected, strict=True):
            assert (values["crop"].dtype, values["mirrored"].dtype) == (np.int32, np.bool_)
            made = [cut.finish(*row) for row in zip(*values.values(), strict=True)]
            np.testing.assert_array_equal(np.stack(made), pixels)
            np.testing.assert_array_equal(pictures_of([values, labels], cut), pixels)
            np.testing.assert_array_equal([labels, numbers], others)
        assert all(record.shown for record in shown)
