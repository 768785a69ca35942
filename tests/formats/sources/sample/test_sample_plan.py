from hypothesis import given, strategies as st

from shardprep.formats.records.labels import official_words
from shardprep.formats.sources.sample import PHOTOGRAPHS, TRAIN_ODDITIES, Album, SamplePlan

PLANS = st.builds(
    SamplePlan,
    classes=st.integers(1, 1000),
    train_per_class=st.integers(1, 12),
    val=st.integers(1, 150),
    test=st.integers(1, 20),
    seed=st.integers(0, 2**70),
)


@given(PLANS)
def test_images_have_their_own_key_and_seed_and_a_photograph_of_their_class(plan: SamplePlan) -> None:
    labels = range(min(plan.classes, 30))
    images = [*plan.val_images(), *plan.test_images(), *(i for n in labels for i in plan.train_images(n))]
    assert len({image.key for image in images}) == len({image.seed for image in images}) == len(images)
    assert all(image.photograph in plan.photographs(image.label) for image in images)


@given(PLANS)
def test_an_oddity_is_always_made_of_the_same_photograph_and_there_when_counts_allow(
    plan: SamplePlan,
) -> None:
    labels = range(min(plan.classes, len(TRAIN_ODDITIES)))
    odd = [image for label in labels for image in plan.train_images(label) if image.oddity]
    assert len(odd) == min(len(TRAIN_ODDITIES), plan.classes * plan.train_per_class)
    assert all(TRAIN_ODDITIES[image.photograph] == image.oddity for image in odd)


@given(PLANS)
def test_classes_are_official_distinct_and_not_sorted(plan: SamplePlan) -> None:
    assert len(set(plan.wnids)) == plan.classes
    assert set(plan.wnids) <= official_words().keys()
    assert plan.classes == 1 or list(plan.wnids) != sorted(plan.wnids)


def test_the_plan_knows_how_many_photographs_there_are() -> None:
    assert len(Album.load().photographs) == PHOTOGRAPHS
