"""A path that begins with ~ is in the home folder, wherever users give one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_public import CALLS

from shardprep import formats
from shardprep.formats import UsageError
from shardprep.formats.runtime.user_paths import user_path
from shardprep.loaders import ContactSheet, FakeData, Flow, Loader, RunCard, prove
from shardprep.loaders.engine.trace import Trace
from shardprep.loaders.loader.signature import make_signing_keys
from shardprep.loaders.machines.keys import load_allowed, load_public, load_secret, make_keys
from shardprep.loaders.measuring import measure, tracing
from shardprep.loaders.measuring.disk import DiskProfile, measure_disk
from support.datasets import prep_here
from support.disk_profiles import full_profile
from support.image_files import encoded, pixels
from support.source_builders import write


@pytest.fixture(autouse=True)
def home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lmdb_shards: Path, archives: Path
) -> Iterator[Path]:
    """A home folder with a dataset and archives; nothing is made in the current folder, which is another."""
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
    (home / "dataset").symlink_to(lmdb_shards)
    (home / "archives").symlink_to(archives)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    yield home
    assert list(here.iterdir()) == []


Use = Callable[[Path], None]
COVERED: dict[Use, list[str]] = {}
"""What gives each path of the public functions with a ~, and which these are."""


def gives(paths: str) -> Callable[[Use], Use]:
    def add(use: Use) -> Use:
        COVERED[use] = paths.split()
        return use

    return add


@gives(
    """
    Loader.path Loader.cache Loader.log_epoch.path RunCard.save.path RunCard.load.path
    prove.dataset prove.logs prove.save prove.key prove.signed_by Trace.save.path measure.trace
    ContactSheet.save.path LoaderStats.to_html.path
    """
    + ("InputStats.to_html.path" if find_spec("tensorflow") else "")  # the same function
)
def load(home: Path) -> None:
    with Loader("~/dataset", batch_size=8, workers=0) as loader:
        with tracing(loader) as trace:
            next(iter(loader))
        trace.save("~/trace.json")
        loader.card().save("~/card.json")
        loader.stats().to_html("~/stats.html")
        ContactSheet(loader.replay(0, 0)).save("~/sheet.png")
        assert RunCard.load("~/card.json") == loader.card()
        for _ in loader:
            pass
        loader.log_epoch("~/log")
    make_signing_keys("~/keys")
    proven = prove("~/dataset", ["~/log"], save="~/signed", key="~/keys.pem")
    assert prove("~/dataset", ["~/signed"], signed_by="~/keys.pub.pem").epochs == proven.epochs
    with Loader((home / "dataset").as_uri(), cache="~/loaded", batch_size=8, workers=0) as loader:
        next(iter(loader))
    measure(partial(Loader, "~/dataset", batch_size=8, workers=0), seconds=0.1, trace="~/measured.json")


@gives("""
    convert.source convert.output repair.dataset repair.source repair.root make_sample.output
    plan_conversion.source plan_conversion.output SourceOptions.root
""")
def convert_and_repair(home: Path) -> None:
    formats.convert("~/archives", "~/converted", split="val", workers=0)
    formats.repair("~/converted", "~/archives", workers=0)
    planned = formats.plan_conversion("~/archives", "~/converted", split="val", workers=0)
    assert planned.splits[0].already_complete
    write(home / "pictures/one.png", encoded(pixels(8, 8), ".png"))
    write(home / "list.txt", b"one.png cat")
    options = formats.SourceOptions(root="~/pictures")
    formats.convert("~/list.txt", "~/listed", split="train", source_options=options, workers=0)
    formats.repair("~/listed", "~/list.txt", root="~/pictures", workers=0)
    formats.make_sample("~/sample", classes=1, train_per_class=1, val=1, test=1)


@gives("""
    convert_part.source convert_part.output fetch.folder publish.folder convert_to_url.source
    convert_to_url.scratch
""")
def convert_in_parts_and_fetch(home: Path) -> None:
    for part in (1, 2):
        formats.convert_part("~/archives", "~/in-parts", (part, 2), split="val", workers=0)
    (done,) = formats.convert("~/archives", "~/in-parts", split="val", workers=0)
    formats.fetch(done.path.as_uri(), "~/copy")
    url = (home / "published").as_uri()
    formats.publish("~/copy", url)
    formats.convert_to_url("~/archives", url, scratch="~/scratch", split="val", workers=0)


@gives("DiskProfile.save.path DiskProfile.load.path measure_disk.path")
def profile(home: Path) -> None:
    full_profile().save("~/disk.json")
    assert DiskProfile.load("~/disk.json") == full_profile()
    measure_disk("~/dataset", seconds=0.1)


@gives("ReceiverKeys.secret ReceiverKeys.allowed SenderKeys.secret SenderKeys.receiver")
def keys(home: Path) -> None:
    pair = make_keys("~/name")
    (home / "allowed").mkdir(mode=0o700)
    write(home / "allowed/name.key", pair.public.read_bytes())
    assert load_secret("~/name.key_secret").public == load_public("~/name.key")
    assert list(load_allowed("~/allowed").values()) == ["name"]


@gives("Flow.from_dataset.path Flow.from_dataset.cache Flow.from_files.folder FlowStats.to_html.path")
def flows(home: Path) -> None:
    with Flow.from_dataset("~/dataset") as flow:
        flow.stats().to_html("~/flow.html")
    with Flow.from_dataset((home / "dataset").as_uri(), cache="~/flowing") as flow:
        assert flow.length.items == 204
    write(home / "pictures/cats/one.jpg", b"x")
    assert Flow.from_files("~/pictures").length.items == 1


@gives("write_dataset.output Flow.save.output export.dataset export.output join.dataset join.columns")
def add_columns(home: Path) -> None:
    formats.write_dataset([{"key": str(n), "age": n} for n in range(4)], "~/saved", workers=0)
    with Flow.from_iterable([1, 2]) as flow:
        flow.save("~/flow", workers=0)
    np.save(home / "ages.npy", np.arange(4))
    formats.join("~/saved", {"again": "~/ages.npy"}, workers=0)
    formats.export("~/dataset", "~/tars", to="webdataset", workers=0)


@gives("""
    open_dataset.path Dataset.path inspect.dataset verify.dataset open_dataset.cache verify.cache
    read_manifest.dataset report.dataset report.output report.against find.dataset find.images find.hashes
    gate.dataset gate.against GateResult.save_junit.path Examination.save.path Examination.save_findings.path
    Collection.path open_collection.path collect.out collect.parts
""")
def look(home: Path) -> None:
    with formats.open_dataset("~/dataset") as dataset, formats.Dataset("~/dataset") as same:
        assert len(dataset) == len(same) == 204
        assert formats.inspect(dataset) == formats.inspect("~/dataset")
        write(home / "asked.jpg", dataset[0].image)
    with formats.collect("~/all", ["~/dataset"]) as made, formats.Collection("~/all") as again:
        assert len(made) == len(again) == len(formats.open_collection("~/all")) == 204
    assert formats.read_manifest("~/dataset").records == 204
    assert formats.verify("~/dataset", level="quick").exit_code == 0
    url = (home / "dataset").as_uri()
    with formats.open_dataset(url, cache="~/cache") as dataset:
        assert len(dataset) == 204
    assert formats.verify(url, level="quick", cache="~/cache").exit_code == 0
    found = formats.report("~/dataset", "~/report.html", against="~/dataset", pixels="none")
    formats.gate("~/dataset", {"leaks": 0}, against="~/dataset", pixels="sample").save_junit("~/gate.xml")
    assert formats.find("~/dataset", ["~/asked.jpg"], near=True, hashes="~/hashes")
    found.save_findings("~/findings.json")
    found.save("~/again.html")
    assert (home / "again.html").read_bytes() == (home / "report.html").read_bytes()


def paths_of(call: Any, name: str) -> Iterator[str]:
    """The parameters of a public function, class and its methods that are paths."""
    members = {name: call}
    if inspect.isclass(call):
        members |= {f"{name}.{n}": getattr(call, n) for n in dir(call) if not n.startswith("_")}
    for where, member in members.items():
        if callable(member) and not (inspect.isclass(member) and member is not call):
            for parameter in inspect.signature(member).parameters.values():
                if "PathLike" in str(parameter.annotation):
                    yield f"{where}.{parameter.name}"


@pytest.mark.slow
@pytest.mark.parametrize("use", COVERED, ids=lambda use: use.__name__)
def test_a_path_in_the_home_folder_is_found(use: Use, home: Path) -> None:
    use(home)


def test_every_path_of_the_public_functions_is_tried() -> None:
    public = [*(call for _, call in CALLS if call is not FakeData), Trace]  # its methods are a Flow's
    found = {path for call in public for path in paths_of(call, call.__name__)}

    assert found == {path for paths in COVERED.values() for path in paths}


def test_a_file_with_the_name_of_no_user_is_itself() -> None:
    assert user_path("~no-such-user/x") == Path("~no-such-user/x")
    assert user_path("a/~") == Path("a/~")
    assert user_path(Path("~/x")) == Path.home() / "x"


@pytest.mark.parametrize("words", [("convert", "", "out"), ("convert", "~/archives", ""), ("verify", "")])
def test_an_empty_path_of_an_unset_variable_is_not_the_current_folder(words: tuple[str, ...]) -> None:
    done = prep_here(*words)

    assert (done.returncode, "a path is needed here, not ''" in done.stderr) == (2, True)


NO_URLS: dict[str, Callable[[str], object]] = {
    "a part": lambda url: formats.collect("all", [url]),
    "a collection's folder": lambda url: formats.collect(url, ["~/dataset"]),
    "a collection": formats.open_collection,
    "report": formats.report,
    "join": lambda url: formats.join(url, {"age": "ages.npy"}),
    "export": lambda url: formats.export(url, "out", to="folders"),
    "publish": lambda url: formats.publish(url, "file:///published"),
    "repair": lambda url: formats.repair(url, "~/archives"),
    "a cache": lambda url: formats.open_dataset("file:///train", cache=url),
    "verify": lambda url: formats.verify(url, executor=ThreadPoolExecutor(1), cache="cache"),
    "convert": lambda url: formats.convert("~/archives", url),
}


@pytest.mark.parametrize("name", NO_URLS)
def test_a_url_is_no_path_and_no_folder_gets_its_name(name: str) -> None:
    with pytest.raises(UsageError, match="URL") as caught:
        NO_URLS[name]("s3://user:hunter2@bucket/train")
    assert "hunter2" not in str(caught.value)


def test_commands_take_no_url_for_a_path() -> None:
    done = prep_here("collect", "s3://bucket/all", "~/dataset")
    assert (done.returncode, "s3://" in done.stderr) == (2, True)
