"""The contract of sources: any content, in the files of any layout, is converted to these records or refused.

The laws hold over all members, which write content as the files of their layout.
"""

import pickle
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from shardprep.formats import open_dataset, verify
from shardprep.formats.sources.recognise import recognise
from support.datasets import converted
from support.source_members import CONTENT, IMAGES, MEMBERS, WNIDS, Content, Member, Sample

samples = st.builds(
    Sample,
    st.text("abcXYZ019_", min_size=1, max_size=12),
    st.sampled_from(WNIDS),
    st.sampled_from(IMAGES),
    st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20).map("t{}".format),
)
contents = st.lists(samples, min_size=1, max_size=6, unique_by=lambda sample: sample.stem.lower())

few = settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
over_all = pytest.mark.parametrize("name", MEMBERS)


def records_of(path: Path, output: Path, member: Member) -> list[tuple[Any, ...]]:
    """Convert, and return the records as the member keeps them, sorted."""
    converted(path, output)
    with open_dataset(output) as dataset:
        names = [*(WNIDS if not member.has_names else dataset.classes)]
        return sorted(
            (
                names[record.label] if record.label >= 0 else "",
                record.image,
                text_of(record[member.text]) if member.text else "",
            )
            for record in dataset
        )


def sample_of(name: str, key: str, content: Content) -> Sample:
    """The sample that has the key: it is named by its stem, or numbered."""
    stem = Path(key).stem
    if name == "tensorpack":
        return content[int(stem)]
    named = {f"{s.wnid}_{crc32(s.stem.encode())}" if name == "official tar" else s.stem: s for s in content}
    return named[stem]


def text_of(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def expected(content: Content, name: str) -> list[tuple[Any, ...]]:
    """The same of the content; COCO has no classes of images."""
    member = MEMBERS[name]
    return sorted(("" if name == "COCO" else s.wnid, s.image, s.text if member.text else "") for s in content)


@pytest.mark.slow
@over_all
@few
@given(content=contents)
def test_the_records_are_those_that_were_written(name: str, content: Content) -> None:
    with TemporaryDirectory() as folder:
        path = MEMBERS[name].write(Path(folder) / "source", content)

        assert records_of(path, Path(folder) / "out", MEMBERS[name]) == expected(content, name)
        with open_dataset(Path(folder) / "out") as dataset:
            for record in dataset:
                assert record.image == sample_of(name, record.key, content).image


@over_all
@few
@given(content=contents, seed=st.integers(0, 99))
def test_a_source_is_recognised_and_read_in_any_order_any_number_of_times(
    name: str, content: Content, seed: int
) -> None:
    with TemporaryDirectory() as folder:
        path = MEMBERS[name].write(Path(folder) / "source", content)
        listing = recognise(path, split="train").listing("train")
        numbers = random.Random(seed).choices(range(len(listing.entries)), k=12)
        with listing.reader.open() as reader:
            first = {
                n: (reader.read(listing.entries[n]), reader.values(listing.entries[n])) for n in set(numbers)
            }
        with pickle.loads(pickle.dumps(listing.reader)).open() as copy:  # noqa: S301
            for n in numbers:
                assert (copy.read(listing.entries[n]), copy.values(listing.entries[n])) == first[n]
        assert {image for image, _ in first.values()} <= {sample.image for sample in content}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*MEMBERS} - {"tensorpack", "converted"}))
@few
@example(content=CONTENT, seed=1, order="key")
@example(content=CONTENT, seed=1, order="shuffled")
@given(content=contents, seed=st.integers(0, 99), order=st.sampled_from(["key", "shuffled"]))
def test_the_order_in_which_files_were_made_does_not_matter(
    name: str, content: Content, seed: int, order: str
) -> None:
    """Where records have names: tensorpack's have numbers, and items that were saved keep their order."""
    other = random.Random(seed).sample(content, len(content))
    with TemporaryDirectory() as folder:
        here = Path(folder)
        paths = [MEMBERS[name].write(here / part, some) for part, some in (("a", content), ("b", other))]
        roots = [converted(path, here / f"out{n}", order=order).records_root for n, path in enumerate(paths)]

        assert roots[0] == roots[1]


@over_all
def test_what_is_converted_is_verified_and_other_workers_make_the_same(name: str, tmp_path: Path) -> None:
    path = MEMBERS[name].write(tmp_path / "source", CONTENT)

    manifest = converted(path, tmp_path / "out")

    assert verify(tmp_path / "out", level="decode").exit_code == 0
    assert converted(path, tmp_path / "again", workers=2).root == manifest.root
