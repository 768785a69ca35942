"""What users import: the names, what they cost, and what is said of them."""

import ast
import enum
import importlib
import importlib.metadata
import inspect
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import shardprep
from shardprep import formats, loaders

DOCUMENTED = {
    "shardprep.loaders.flow": ["Flow", "FlowStats", "Length"],
    "shardprep.loaders.frames": [
        "FrameDamaged", "FrameReceiver", "ReceiverGone", "SenderFailed", "read_head", "send_batches", "unpack_batch",
    ],
    "shardprep.loaders.measuring": ["measure", "tracing", "watched"],
    "shardprep.loaders.measuring.disk": [
        "BlockReads", "DepthReads", "DiskProfile", "Measurement", "Missing", "Reads", "SmallFileReads", "measure_disk",
    ],
    "shardprep.loaders.prometheus": ["StatsCollector"],
    "shardprep.loaders.remote": [
        "NotAdmitted", "PlaintextWire", "ReceiverKeys", "Refused", "RemoteSource", "RemoteStats", "SenderKeys",
        "SenderReport", "SenderStats", "WrongReceiver", "serve",
    ],
    "shardprep.loaders.tf_inputs": [
        "BatchQueueInput", "DatasetInput", "DummyConstantInput", "FeedInput", "Input", "InputFailed", "InputMonitor",
        "InputStats", "QueueInput", "StagingInput", "TensorInput", "ZMQInput", "original_errors", "to_dataset",
    ],
    "shardprep.loaders.transforms": [
        "IMAGENET_MEAN", "IMAGENET_STD", "ArraySpec", "ColorJitter", "Cut", "EvalTransform", "TrainTransform",
        "Transform", "TransformInput", "Views", "decode_rgb",
    ],
}  # fmt: skip
"""The public names of each documented module; a change here is a change for users."""

NEEDS = {"shardprep.loaders.tf_inputs": "tensorflow", "shardprep.loaders.prometheus": "prometheus_client"}
INSTALLED = [name for name in DOCUMENTED if find_spec(NEEDS.get(name, "shardprep"))]


def test_the_package_has_the_names_of_its_parts_and_no_others() -> None:
    assert set(shardprep.__all__) == {"__version__", *formats.__all__, *loaders.__all__}
    version = importlib.metadata.version("shardprep")
    assert shardprep.__version__ == version
    said = subprocess.check_output([sys.executable, "-m", "shardprep", "--version"], text=True)
    assert said == f"prep, version {version}\n"
    for home in (formats, loaders):
        assert {name: getattr(shardprep, name) is getattr(home, name) for name in home.__all__} == (
            dict.fromkeys(home.__all__, True)
        )
    assert not {"Any", "TYPE_CHECKING", "import_module", "annotations"} & set(dir(shardprep))
    assert "``convert``" in (shardprep.__doc__ or "")
    with pytest.raises(AttributeError, match="has no attribute 'Loadr'"):
        _ = shardprep.Loadr  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", INSTALLED)
def test_a_documented_module_has_the_names_that_users_know(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(DOCUMENTED[module])
    assert all(hasattr(found, name) for name in DOCUMENTED[module])


def test_the_package_gives_the_names_that_training_programs_use() -> None:
    names = ["measure", "serve", "tracing", "watched", "ReceiverKeys", "RemoteSource", "SenderKeys"]
    modules = ["shardprep.loaders.measuring", "shardprep.loaders.remote"]
    if find_spec("tensorflow"):
        names += ["QueueInput", "StagingInput", "DatasetInput", "ZMQInput", "to_dataset"]
        modules.append("shardprep.loaders.tf_inputs")
    homes = [importlib.import_module(module) for module in modules]
    members = dict(inspect.getmembers(shardprep))  # as help() and completion do, without all frameworks
    here = {name for name, needed in (("to_torch", "torch"), ("to_jax", "jax")) if find_spec(needed)}
    assert {*names, *here, "Loader", "Flow", "convert", "verify"} <= members.keys()
    for name in names:
        assert members[name] is next(getattr(home, name) for home in homes if hasattr(home, name))
    found = {vars(n).get("module"): n for n in ast.walk(ast.parse(Path(shardprep.__file__).read_text()))}
    for module, own in shardprep._MODULES.items():  # type: ignore[attr-defined]
        assert [name.name for name in found[module].names] == own  # as type checkers see them


def test_importing_the_package_imports_next_to_nothing() -> None:
    heavy = "{'shardprep.formats', 'shardprep.loaders', 'cv2', 'h5py', 'lmdb', 'numpy', 'zmq', 'click'}"

    for more in ("", "shardprep.open_dataset; heavy = {'cv2', 'h5py', 'lmdb'}"):
        program = f"import sys, shardprep\nheavy = {heavy}\n{more}\nprint(heavy & {{*sys.modules}})"
        assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=120) == "set()\n"


def stated(call: Any) -> str:
    """All docstrings that say what a callable's parameters are: its own, and those of its bases."""
    kinds = call.__mro__ if inspect.isclass(call) else ()
    inherited = [kind for kind in kinds if kind.__module__.startswith("shardprep")]
    return "\n".join(
        found.__doc__ or ""
        for found in (call, *inherited, *([call.__init__] if inspect.isclass(call) else []))
    )


CALLS = sorted(
    {
        f"{value.__module__}.{value.__qualname__}": value
        for module in (shardprep, *map(importlib.import_module, INSTALLED))
        for name in module.__all__
        if callable(value := getattr(module, name)) and value.__module__.startswith("shardprep")
        if not (inspect.isclass(value) and issubclass(value, BaseException | enum.Enum))
    }.items()
)


@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[name for name, _ in CALLS])
def test_a_public_callable_documents_every_parameter_and_its_annotations_can_be_evaluated(call: Any) -> None:
    names = inspect.signature(call, eval_str=True).parameters.keys() - {"args", "kwargs"}
    assert [name for name in names if not re.search(rf"\b{name}\b", stated(call))] == []


PROGRAM = """
from collections.abc import Callable, Sized

from shardprep import Flow, Loader

begin: Callable[[Sized], Flow] = Flow.from_iterable  # such as torch's Dataset
with Loader("shards", batch_size=4) as loader:
    number: int = loader.dataset
"""


@pytest.mark.torture
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_finds_the_types_without_an_option(tmp_path: Path, checker: str) -> None:
    pytest.importorskip(checker, reason=f"{checker} is not installed")
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [sys.executable, "-m", checker, "train.py"]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert '"Dataset | Collection"' in done.stdout
    assert "1 error" in done.stdout
