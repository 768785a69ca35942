"""A Loader under any sequence of calls delivers what the documented order says, and nothing else.

The order, the shares of the ranks, the receipts and the random values come from ``whole_order``, which does
not use the package, and the contents of the batches from single records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shardprep.formats import make_sample, open_dataset
from shardprep.formats.errors import UsageError
from shardprep.formats.storage import open as collections
from shardprep.loaders import EvalTransform, GlobalShuffle, Loader, LocalShuffle, Receipt, TrainTransform
from shardprep.loaders.transforms.contract import TransformInput
from support.cut_datasets import collected
from support.datasets import converted
from support.loaded import exact, own
from support.loader_workers import Tagging, reject
from support.sampling import torture_except
from support.whole_order import AUGMENTATION, Ranks, Shares, philox, tally, whole_order

pytestmark = pytest.mark.filterwarnings("ignore::shardprep.loaders.SortedByClass")

RECORDS, CUTS = 60, (3, 8)  # shards at which the parts of the collection begin
BAD = (3, 17, 18, 40)  # records that a transform rejects

ShuffleOption = LocalShuffle | GlobalShuffle | None


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same 60 images in 13 shards of two to six, in each kind of dataset."""
    folder = tmp_path_factory.mktemp("machine")
    make_sample(folder / "archives", classes=4, train_per_class=15, val=10, test=3)
    for container in ("lmdb", "hdf5"):
        converted(folder / "archives", folder / container, shard_size=150_000, container=container)
    return {
        "lmdb": folder / "lmdb",
        "hdf5": folder / "hdf5",
        "collection": collected(folder / "lmdb", folder / "cut", *CUTS),
    }


def varied(record: TransformInput, rng: np.random.Generator) -> dict[str, Any]:
    """Values of every form that is stacked, or is a list, without a declaration."""
    return {
        "noise": rng.random(2),
        "name": record.key,
        "length": len(record.image),
        "boxes": rng.random((1 + len(record.image) % 2, 4)),
    }


@dataclass(frozen=True)
class Choice:
    """What a run is: the options of which another value is another run."""

    kind: str
    shuffle: ShuffleOption
    seed: int
    chosen: str
    weights: tuple[float, ...] | None
    transform: str
    labels: str
    files: bool  # the rows of the index are read when they are needed
    without: str
    gaps: str

    @property
    def skips(self) -> bool:
        return self.transform == "rejecting"


CHOSEN: dict[str, Callable[[dict[str, int]], dict[str, Any]]] = {  # by the labels of the classes' names
    "all": lambda labels: {},
    "a mask": lambda labels: {"records": np.arange(RECORDS) % 3 > 0},
    "numbers": lambda labels: {"records": [50, 3, 20, 9, 31, 4, 5, 6, 17, 58, 44, 30]},
    "labels": lambda labels: {"classes": np.sort([*labels.values()])[1::2]},
    "names": lambda labels: {"classes": sorted(labels)[2::-2]},
    "both": lambda labels: {"records": np.arange(5, 55), "classes": {*sorted(labels.values())[:2]}},
}
OMITTED = (4, 9, 20, 21, 22, 31, 50)
WITHOUT: dict[str, Callable[[list[str]], Any]] = {  # by the keys of all records
    "nothing": lambda keys: None,
    "numbers": lambda keys: [*OMITTED],
    "a mask": lambda keys: np.isin(np.arange(RECORDS), OMITTED),
    "keys": lambda keys: [keys[number] for number in OMITTED],
}
SHUFFLES: list[ShuffleOption] = [
    LocalShuffle(20),
    LocalShuffle(7, partitions=2),
    GlobalShuffle(),
    None,
    LocalShuffle("200KB"),
    LocalShuffle(30, partitions=4),
    LocalShuffle(1),
    LocalShuffle(1000, partitions=2),
]
TRANSFORMS = ["tagged", "crops", "bytes", "rejecting", "varied", "centre"]

choices = st.builds(
    Choice,
    kind=st.sampled_from(["lmdb", "hdf5", "collection"]),
    shuffle=st.sampled_from(SHUFFLES),
    seed=st.sampled_from([0, 7, (1 << 64) - 1]),
    chosen=st.sampled_from([*CHOSEN]),
    weights=st.none() | st.sampled_from([(5.0, 2.0, 3.0), (0.7, 8.5, 1.0)]),
    transform=st.sampled_from(TRANSFORMS),
    labels=st.sampled_from(["sorted_wnid0", "sorted_wnid1_bg", "ilsvrc2012_id"]),
    files=st.booleans(),
    without=st.sampled_from(["nothing", *WITHOUT]),
    gaps=st.sampled_from(["close", "keep"]),
)
ranks = st.builds(Ranks, world=st.integers(1, 4), batch=st.integers(1, 17), drop_last=st.booleans())


@dataclass(frozen=True)
class CoursePlace:
    """Where the rest of an epoch begins, and the places of its order that it passes."""

    epoch: int
    start: int = 0
    passed: tuple[int, ...] = ()

    @property
    def within(self) -> int:
        """The start among the places that are not passed."""
        return self.start - sum(1 for place in self.passed if place < self.start)

    def outside(self, place: int) -> int:
        """A place among those that are not passed, as one of the epoch."""
        for passed in self.passed:
            place += place > passed
        return place


class Oracle:
    """What a run delivers, by place of the order, and what a batch of it has."""

    def __init__(self, choice: Choice, folders: dict[str, Path]) -> None:
        if choice.weights and (choice.kind != "collection" or choice.chosen == "numbers"):
            choice = replace(choice, weights=None)
        self.path, self.whole = folders[choice.kind], open_dataset(folders["lmdb"], labels=choice.labels)
        self.keys = [record.key for record in self.whole]
        self.labels = [record.label for record in self.whole]
        names = (self.whole.classes[class_] for class_ in self.whole.index["label"])
        self.label_of = dict(zip(names, self.labels, strict=True))
        self.chosen = CHOSEN[choice.chosen](self.label_of)
        self.numbers = self._numbers()
        if choice.shuffle and choice.shuffle.partitions > len(self.numbers):
            choice = replace(choice, shuffle=None)
        self.partitions = choice.shuffle.partitions if choice.shuffle else 1
        if choice.weights or self.partitions > 1:
            choice = replace(choice, gaps="keep")
        self.choice = choice
        self.closes = choice.gaps == "close"
        self.order, self.records = cache(self._order), cache(self._records)
        self.steps, self._row = cache(self._steps), cache(self._made_row)

    def _numbers(self) -> list[int]:
        records = np.asarray(self.chosen.get("records", range(RECORDS)))
        numbers = np.flatnonzero(records) if records.dtype == bool else np.sort(records)
        labels = {self.label_of.get(each, each) for each in self.chosen.get("classes", self.label_of)}
        return [int(number) for number in numbers if self.labels[number] in labels]

    def __len__(self) -> int:
        """The places of an epoch's order."""
        return len(self.order(0))

    def omitted(self, epoch: int) -> list[int]:
        """The places of the records that are left out on purpose."""
        if self.choice.without == "nothing":
            return []
        return [place for place, number in enumerate(self.records(epoch)) if number in OMITTED]

    @cached_property
    def _shards(self) -> list[int]:
        """The chosen records of each shard."""
        shards = self.whole.index["shard"]
        counts: list[int] = np.bincount(shards[self.numbers], minlength=int(shards.max()) + 1).tolist()
        return counts

    @cached_property
    def _shares(self) -> Shares | None:
        parts = self._parts(self._shards)
        return Shares.of(self.choice.weights, [sum(own) for own in parts]) if self.choice.weights else None

    def _parts(self, shards: list[int]) -> list[list[int]]:
        first, second = CUTS
        return [shards[:first], shards[first:second], shards[second:]]

    @cached_property
    def _shuffle(self) -> ShuffleOption:
        shuffle = self.choice.shuffle
        if isinstance(shuffle, LocalShuffle) and shuffle.window == "200KB":
            return LocalShuffle(int(200_000 / self.whole.index["length"][self.numbers].mean()))
        return shuffle

    def _order(self, epoch: int) -> list[int]:
        """The places of an epoch in the order in which they come."""
        counts = self._shares.blocks(self._parts(self._shards)) if self._shares else self._shards
        order = whole_order(counts, shuffle=self._shuffle, seed=self.choice.seed, epoch=epoch)
        assert sorted(order.tolist()) == list(range(len(self.numbers)))
        return [place for place in order.tolist() if not (self.closes and place in self.omitted(epoch))]

    def _records(self, epoch: int) -> list[int]:
        """The record number at each place, in stored order."""
        found = self._shares.positions(epoch) if self._shares else range(len(self.numbers))
        return [self.numbers[position] for position in found]

    def _steps(self, course: CoursePlace, over: Ranks) -> list[list[list[int]]]:
        """The places of each rank at each step of the rest of an epoch."""
        passed = set(course.passed)
        order = [place for at, place in enumerate(self.order(course.epoch)) if at not in passed]
        steps = over.steps(len(order), self.partitions, course.within)
        return [[[order[at] for at in mine] for mine in step] for step in steps]

    def wanted(self, places: Sequence[int], epoch: int) -> list[int]:
        """The places whose records are not left out on purpose."""
        return [place for place in places if place not in self.omitted(epoch)]

    def good(self, places: Sequence[int], epoch: int) -> list[int]:
        """The places whose records are delivered."""
        wanted = self.wanted(places, epoch)
        return [p for p in wanted if not (self.choice.skips and self.records(epoch)[p] in BAD)]

    def bad(self, places: Sequence[int], epoch: int) -> list[int]:
        return sorted(set(self.wanted(places, epoch)) - set(self.good(places, epoch)))

    def transform(self, name: str | None = None) -> Any:
        name = name or self.choice.transform
        return {
            "bytes": None,
            "crops": TrainTransform(16),
            "centre": EvalTransform((8, 9), resize=10, dtype="float32", layout="CHW"),
            "tagged": Tagging(),
            "rejecting": Tagging({self.keys[number]: reject for number in BAD}),
            "varied": varied,
        }[name]

    def _made_row(self, name: str, number: int, epoch: int, item: int) -> Any:
        record = self.whole[number]
        if name == "bytes":
            return record.image
        rng = np.random.Generator(philox(AUGMENTATION, seed=self.choice.seed, epoch=epoch, item=item))
        return deepcopy(self.transform("tagged" if name == "rejecting" else name)(record, rng))

    def batch(self, places: Sequence[int], epoch: int, name: str | None = None) -> list[Any]:
        """The parts of the batch of these places."""
        name, places = name or self.choice.transform, self.good(places, epoch)
        numbers = [self.records(epoch)[place] for place in places]
        items = places if self._shares else numbers
        rows = [self._row(name, number, epoch, item) for number, item in zip(numbers, items, strict=True)]
        labels = np.array([self.labels[number] for number in numbers], np.int64)
        if not rows and name in ("crops", "centre"):  # all records of a batch may be left out
            row = self._row(name, 0, 0, 0)
            shown = row[0] if isinstance(row, tuple) else row
            return [exact(shown[np.newaxis][:0]), exact(labels), exact(np.array(numbers, np.int64))]
        return [*_parts(name, rows), exact(labels), exact(np.array(numbers, np.int64))]

    def make(
        self, over: Ranks, rank: int, workers: int = 0, name: str | None = None, **others: Any
    ) -> Loader:
        choice, options = self.choice, dict[str, Any](self.chosen)
        if choice.weights:
            options["weights"] = {f"part-{n}": weight for n, weight in enumerate(choice.weights)}
        options |= {"without": WITHOUT[choice.without](self.keys), "gaps": choice.gaps}
        options |= {"shuffle": choice.shuffle, "seed": choice.seed, "labels": choice.labels}
        options |= {"transform": self.transform(name), "with_numbers": True, "workers": workers}
        options |= {"on_bad_record": "skip" if choice.skips else "raise", "drop_last": over.drop_last}
        options |= {"batch_size": over.batch, "world_size": over.world, "rank": rank} | others
        with patch.object(collections, "MAX_INDEX_BYTES", 0 if choice.files else 1 << 30):
            return Loader(self.path, **options)


def _parts(name: str, rows: list[Any]) -> list[Any]:
    """The parts of a batch that a transform makes, as ``form`` describes them."""
    if name == "bytes" or (name == "varied" and not rows):  # no form is known
        return [rows]
    if name == "varied":
        return [{key: _stacked([row[key] for row in rows]) for key in ("noise", "name", "length", "boxes")}]
    if name in ("tagged", "rejecting"):
        kinds = (("uint32", ()), ("float64", (2,)), ("int64", ()))
        columns = [[row[n] for row in rows] for n in range(3)]
        arrays = [np.array(each, kind) for each, (kind, _) in zip(columns, kinds, strict=True)]
        return [exact(each.reshape(-1, *shape)) for each, (_, shape) in zip(arrays, kinds, strict=True)]
    return [exact(np.stack([row[0] if isinstance(row, tuple) else row for row in rows]))]


def _stacked(values: list[Any]) -> Any:
    if not values or isinstance(values[0], str):
        return values
    arrays = [np.asarray(value) for value in values]
    is_stacked = len({each.shape for each in arrays}) == 1
    return exact(np.stack(arrays)) if is_stacked else [exact(each) for each in arrays]


def form(part: Any) -> Any:
    """What is compared of a part: dtype, shape and bytes of arrays."""
    if isinstance(part, dict):
        return {name: form(inner) for name, inner in part.items()}
    return [exact(own(each)) for each in part] if isinstance(part, list) else exact(part)


@dataclass
class Course:
    """An epoch, or the rest of one from ``start`` on, and how far the ranks are, all at the same step."""

    at: CoursePlace
    done: int = 0
    is_ended: bool = False  # all ranks have asked for a batch after their last one
    delivered: dict[int, list[int]] = field(default_factory=dict)  # places by rank, the skipped ones included
    before: list[int] = field(default_factory=list)  # places that other ranks had
    receipts: list[dict[str, Any]] = field(default_factory=list)  # of those

    @classmethod
    def of(cls, epoch: int) -> Course:
        return cls(CoursePlace(epoch))

    @property
    def epoch(self) -> int:
        return self.at.epoch

    def stop(self, over: Ranks, records: int) -> int:
        """Where the epoch ends, among the places that are not passed."""
        return over.stop(records - len(self.at.passed), self.at.within)

    def reached(self, over: Ranks, records: int) -> int:
        """The place that all ranks have reached, among those that are not passed."""
        first = self.at.within
        return min(first + self.done * over.step, max(first, self.stop(over, records)))

    def place(self, over: Ranks, records: int) -> int:
        """The place of the epoch that all ranks have reached."""
        return self.at.outside(self.reached(over, records)) if self.done else self.at.start

    def is_over(self, over: Ranks, records: int) -> bool:
        return self.is_ended or self.reached(over, records) == self.stop(over, records)


@dataclass(frozen=True)
class Saved:
    """The states of all ranks, as text, and what they have to mean."""

    states: list[str]
    over: Ranks
    course: Course
    place: int
    transform: str


class LoaderMachine(RuleBasedStateMachine):
    """All ranks of a training, side by side, and what each has to deliver next."""

    folders: ClassVar[dict[str, Path]]
    has_processes: ClassVar[bool]  # for one of the ranks
    saved: Bundle[Saved] = Bundle("saved")

    def __init__(self) -> None:
        super().__init__()
        self.loaders: list[Loader] = []
        self.running: list[Iterator[Any]] = []

    @initialize(choice=choices, over=ranks)
    def begin(self, choice: Choice, over: Ranks) -> None:
        self.oracle = Oracle(choice, self.folders)
        self.name = self.oracle.choice.transform
        self.next = self.current = Course.of(0)
        self.place_is_next = True
        self._make(over, workers=1)

    def _make(self, over: Ranks, workers: int) -> None:
        self._close()
        self.over = over.fitting(len(self.oracle), self.oracle.partitions)
        self.keys = [self.oracle.keys[number] for number in self.oracle.numbers]
        self.skipped: list[set[str]] = [set() for _ in range(self.over.world)]
        for rank in range(self.over.world):
            own = workers if self.has_processes and rank == 0 else 0
            self.loaders.append(self.oracle.make(self.over, rank, own, self.name))

    def _close(self) -> None:
        self.running = []
        for loader in self.loaders:
            loader.close()
        self.loaders = []

    def teardown(self) -> None:
        self._close()
        self.oracle.whole.close()

    # What is done

    def _start(self) -> None:
        self.running = [iter(loader) for loader in self.loaders]
        self._check_states()  # the epoch begins with its first batch
        self.current, self.next = self.next, Course.of(self.next.epoch + 1)
        self.place_is_next = False

    @rule(steps=st.integers(1, 12))
    def train(self, steps: int) -> None:
        """Go on with the iteration, or begin the next epoch."""
        if not self.running:
            self._start()
        for _ in range(steps):
            if not self._step():
                break

    @rule()
    def train_to_the_end(self) -> None:
        """Have what is left of an epoch, and the proof that it had each record once."""
        if not self.running:
            self._start()
        while self._step():
            pass
        self._check_that_all_came_once()

    def _step(self) -> bool:
        """Take the next batch of each rank; return whether there was one."""
        course, steps = self.current, self._steps(self.current)
        expected = steps[course.done] if course.done < len(steps) else [[]] * self.over.world
        for rank, (batches, places) in enumerate(zip(self.running, expected, strict=True)):
            batch = next(batches, None)
            assert (batch is None) == (not places)
            if batch is not None:
                assert self._found(batch) == self.oracle.batch(places, course.epoch, self.name)
                course.delivered.setdefault(rank, []).extend(self.oracle.wanted(places, course.epoch))
                bad = [self.oracle.records(course.epoch)[p] for p in self.oracle.bad(places, course.epoch)]
                self.skipped[rank] |= {self.oracle.keys[number] for number in bad}
                self.place_is_next = False
        course.done += course.done < len(steps)
        course.is_ended = course.is_ended or not any(expected)
        if not any(expected):
            self.running = []
        return bool(self.running)

    def _found(self, batch: Sequence[Any]) -> list[Any]:
        return [form(part) for part in batch]

    def _steps(self, course: Course) -> list[list[list[int]]]:
        return self.oracle.steps(course.at, self.over)

    def _check_that_all_came_once(self) -> None:
        course, records = self.current, len(self.oracle.numbers)
        mine = [place for places in course.delivered.values() for place in places]
        left_out, omitted = self._left_out(course), self._omitted(course)
        assert sorted([*course.before, *mine, *left_out, *omitted]) == list(range(records))

        parts = [Receipt.from_json(each) for each in course.receipts]
        receipt = Receipt.merge([*parts, *(loader.receipt() for loader in self.loaders)])
        skipped = self.oracle.bad([*course.before, *mine], course.epoch)
        receipt.check(records, left_out=len(left_out), skipped=len(skipped), omitted=len(omitted))
        assert receipt.is_complete == (not skipped and not left_out and not omitted)

    def _left_out(self, course: Course) -> list[int]:
        """The places after the last step of all ranks."""
        passed = set(course.at.passed)
        order = [place for at, place in enumerate(self.oracle.order(course.epoch)) if at not in passed]
        return self.oracle.wanted(order[course.stop(self.over, len(self.oracle)) :], course.epoch)

    def _omitted(self, course: Course) -> list[int]:
        """The places that are left out on purpose."""
        order = self.oracle.order(course.epoch)
        passed = self.oracle.wanted([order[at] for at in course.at.passed], course.epoch)
        return [*self.oracle.omitted(course.epoch), *passed]

    @precondition(lambda self: self.running)
    @rule()
    def leave(self) -> None:
        """Stop in the middle."""
        self.running = []

    @precondition(lambda self: self.running)
    @rule()
    def begin_again(self) -> None:
        """Begin another iteration, which ends the one before."""
        before, course = self.running, self.current
        self._start()
        self._step()
        self._check_that_they_ended(before, course)

    def _check_that_they_ended(self, before: list[Iterator[Any]], course: Course) -> None:
        for rank, batches in enumerate(before):
            if any(step[rank] for step in self._steps(course)[course.done :]):
                with pytest.raises(UsageError, match=r"another iteration .* has begun"):
                    next(batches)
            else:
                assert next(batches, None) is None

    @rule(epoch=st.integers(0, 5) | st.just(1 << 63))
    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.set_epoch(epoch)
        self.next, self.place_is_next = Course.of(epoch), True

    @rule(steps=st.lists(st.integers(0, 40), min_size=1, max_size=3))
    def skip(self, steps: list[int]) -> None:
        """Leave steps out of the next epoch; what has gone by, or does not exist, is an error."""
        course, records = self.next, len(self.oracle)
        stop, passed = self.over.stop(records), set(course.at.passed)
        places = {step: range(step * self.over.step, (step + 1) * self.over.step) for step in steps}
        ends = [course.at.start, *self._ends(course.at.passed)]
        fine = all(end % self.over.step == 0 or end == records for end in ends) and all(
            0 <= own.start < stop and (own.start >= course.at.start or {*own} & {*range(stop)} <= passed)
            for own in places.values()
        )
        after = passed | {at for own in places.values() for at in own if at < stop}
        for loader in self.loaders:
            if fine:
                loader.skip(steps)
            else:
                before = loader.state_dict()
                with pytest.raises(UsageError, match="step"):
                    loader.skip(steps)
                assert loader.state_dict() == before
        if fine:
            passed = after
            at = replace(course.at, passed=tuple(sorted(passed)))
            changed = replace(course, at=at)
            if self.current is course:
                self.current = changed
            self.next = changed

    def _ends(self, passed: tuple[int, ...]) -> list[int]:
        """Where runs of places begin and end."""
        places = set(passed)
        begins = [place for place in passed if place - 1 not in places]
        return begins + [place + 1 for place in passed if place + 1 not in places]

    @rule(target=saved)
    def save(self) -> Saved:
        """Keep the states of all ranks."""
        course, place = self._resumable()
        states = [json.dumps(loader.state_dict()) for loader in self.loaders]
        assert max(map(len, states)) < 3000  # characters
        return Saved(states, self.over, deepcopy(course), place, self.name)

    def _resumable(self) -> tuple[Course, int]:
        """The epoch of a state that is taken now, and its place."""
        records = len(self.oracle)
        is_next = self.place_is_next or self.current.is_over(self.over, records)
        course = self.next if is_next else self.current
        return course, course.place(self.over, records)

    @rule(saved=saved, over=ranks, which=st.integers(0, 3), workers=st.integers(0, 2), is_same=st.booleans())
    def resume(self, saved: Saved, over: Ranks, which: int, workers: int, is_same: bool) -> None:
        """Load states into new loaders, of as many ranks, or of others; then they are all of one old rank."""
        self.name = saved.transform
        self._make(saved.over if is_same else over, workers)
        self._load(saved, which)

    @rule(saved=saved, which=st.integers(0, 3))
    def resume_here(self, saved: Saved, which: int) -> None:
        """Load states into the loaders that there are, which ends an iteration under way."""
        before, course, self.running = self.running, self.current, []
        options = {} if self.name == saved.transform else {"transform": "changed"}
        if options:
            with pytest.raises(UsageError, match="transform"):
                self.loaders[0].load_state_dict(json.loads(saved.states[0]))
        self._load(saved, which, **options)
        self._check_that_they_ended(before, course)

    @rule(saved=saved, over=ranks, name=st.sampled_from([name for name in TRANSFORMS if name != "rejecting"]))
    def resume_with_another_transform(self, saved: Saved, over: Ranks, name: str) -> None:
        """Go on with the records that are left, in other batches, and made in another way."""
        if self.oracle.choice.skips:
            return
        self.name = name
        self._make(over, 0)
        self._load(saved, 0, transform="changed")

    def _load(self, saved: Saved, which: int, **options: Any) -> None:
        for rank, loader in enumerate(self.loaders):
            of = rank if self.over.world == saved.over.world else which % saved.over.world
            loader.load_state_dict(json.loads(saved.states[of]), **options)
        old = deepcopy(saved.course)
        course = replace(old, at=replace(old.at, start=saved.place), done=0, is_ended=False)
        if self.over.world != saved.over.world:
            course.before += [place for places in old.delivered.values() for place in places]
            course.receipts += [json.loads(state)["receipt"] for state in saved.states]
            course.delivered = {}
        self.next = self.current = course
        self.place_is_next = True

    # What is looked at, and changes nothing

    @rule(rank=st.integers(0, 3), epoch=st.integers(0, 3), steps=st.lists(st.integers(0, 99), max_size=4))
    def single_steps(self, rank: int, epoch: int, steps: list[int]) -> None:
        """Have steps in any order; an iteration ends by it."""
        rank, self.running = rank % self.over.world, []
        mine = [step[rank] for step in self.oracle.steps(CoursePlace(epoch), self.over) if step[rank]]
        wanted = [step % len(mine) for step in steps]
        for step, loaded in zip(wanted, self.loaders[rank].steps(epoch, wanted), strict=True):
            last = self.over.stop(len(self.oracle)) if step == len(mine) - 1 else len(self.oracle)
            assert loaded.step == step
            assert self._found(loaded.batch) == self.oracle.batch(mine[step], epoch, self.name)
            assert loaded.delivered.tolist() == self.oracle.good(mine[step], epoch)
            assert sorted(loaded.skipped.tolist()) == self.oracle.bad(mine[step], epoch)
            assert loaded.left_out.tolist() == self.oracle.wanted(self.oracle.order(epoch)[last:], epoch)
            assert loaded.omitted.tolist() == (self.oracle.omitted(epoch) if step == len(mine) - 1 else [])
        with pytest.raises(IndexError):
            next(self.loaders[rank].steps(epoch, [len(mine)]))

    @rule(rank=st.integers(0, 3), step=st.integers(0, 99), is_rest=st.booleans())
    def replay(self, rank: int, step: int, is_rest: bool) -> None:
        """Make a step again; an iteration goes on."""
        course, rank = self.current, rank % self.over.world
        start = course.at.start if is_rest else 0
        at = CoursePlace(course.epoch, start)  # steps that are passed can be replayed, too
        mine = [places[rank] for places in self.oracle.steps(at, self.over) if places[rank]]
        if not mine:
            return
        places = mine[step % len(mine)]
        made = self.loaders[rank].replay(course.epoch, step % len(mine), start=start)
        good = self.oracle.good(places, course.epoch)
        numbers = [self.oracle.records(course.epoch)[place] for place in good]
        assert self._found(made.batch) == self.oracle.batch(places, course.epoch, self.name)
        assert made.numbers.tolist() == numbers
        assert made.keys == [self.oracle.keys[number] for number in numbers]
        assert len(made.skipped) == len(self.oracle.bad(places, course.epoch))

    @rule(
        saved=saved, rank=st.integers(0, 3), other=st.sampled_from(["seed", "shuffle", "records", "weights"])
    )
    def refuse_another(self, saved: Saved, rank: int, other: str) -> None:
        """Load the state of another order, or of another part of the dataset, which changes nothing."""
        if other == "weights" and not self.oracle.choice.weights:
            return
        weights = {"part-0": 2.0, "part-1": 2.0, "part-2": 1.0}
        others = {
            "seed": 1,
            "shuffle": LocalShuffle(41),
            "records": self.oracle.numbers[1:],
            "weights": weights,
        }
        said = other if other in ("seed", "shuffle") else "dataset"
        with self.oracle.make(
            Ranks(1, 4, False), 0, name=saved.transform, **{other: others[other]}
        ) as loader:
            before = loader.state_dict()
            with pytest.raises(UsageError, match=f"another {said}"):
                loader.load_state_dict(json.loads(saved.states[rank % len(saved.states)]))
            assert loader.state_dict() == before

    # What holds at any moment

    @invariant()
    def the_loaders_say_where_they_are(self) -> None:
        if self.loaders:
            self._check_lengths_and_numbers()
            self._check_receipts()
            self._check_states()

    def _check_lengths_and_numbers(self) -> None:
        rest, whole = self._steps(self.next), self.oracle.steps(CoursePlace(0), self.over)
        for rank, loader in enumerate(self.loaders):
            assert len(loader) == sum(1 for step in rest if step[rank])
            assert loader.batches_per_epoch == sum(1 for step in whole if step[rank])
            assert loader.epoch == self.next.epoch
            assert loader.records.tolist() == self.oracle.records(self.next.epoch)
            reasons = dict.fromkeys(self.skipped[rank], "does not decode")
            assert {key: loader.skipped[key] for key in reasons} == reasons
            assert set(loader.skipped) <= {self.oracle.keys[number] for number in BAD}
            assert self.oracle.choice.skips or not loader.skipped
            assert [loader.key(number) for number in self.oracle.numbers] == self.keys

    def _check_receipts(self) -> None:
        course, records = self.current, len(self.oracle)
        for rank, loader in enumerate(self.loaders):
            places = course.delivered.get(rank, [])
            has_all = course.reached(self.over, records) == course.stop(self.over, records)
            omitted = self._omitted(course) if has_all else []
            assert loader.receipt().to_json() == ({"omitted": tally(omitted)} if omitted else {}) | {
                "version": 1,
                "dataset": loader.identity["dataset"],
                "epoch": course.epoch,
                "delivered": tally(self.oracle.good(places, course.epoch)),
                "skipped": self.oracle.bad(places, course.epoch),
                "left_out": tally(self._left_out(course) if has_all else []),
            }

    def _check_states(self) -> None:
        course, place = self._resumable()
        for rank, loader in enumerate(self.loaders):
            state = loader.state_dict()
            assert (state["version"], state["seed"]) == (1 + bool(course.at.passed), self.oracle.choice.seed)
            assert (state["rank"], state["world_size"]) == (rank, self.over.world)
            assert (state["epoch"], state["start"], state["place"]) == (course.epoch, course.at.start, place)


def run(folders: dict[str, Path], examples: int, steps: int, *, has_processes: bool = False) -> None:
    machine = type("Machine", (LoaderMachine,), {"folders": folders, "has_processes": has_processes})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.generate),  # shrinking takes longer than a test may
        ),
    )


@pytest.mark.parametrize(("examples", "steps"), torture_except([(35, 15), (40, 25)], (35, 15)))
def test_any_calls_deliver_what_the_order_says(folders: dict[str, Path], examples: int, steps: int) -> None:
    run(folders, examples, steps)


@pytest.mark.slow
@pytest.mark.parametrize(("examples", "steps"), torture_except([(3, 6), (6, 10)], (3, 6)))
def test_worker_processes_deliver_it_too(folders: dict[str, Path], examples: int, steps: int) -> None:
    run(folders, examples, steps, has_processes=True)
