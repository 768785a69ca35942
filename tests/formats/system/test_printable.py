"""Text from files is shown on one line, printable and not too long; the attributes keep it unchanged."""

import pickle
import re
from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

import pytest

import shardprep
from shardprep.formats import ShardprepError


def every_error() -> Iterator[type[ShardprepError]]:
    for module in walk_packages(shardprep.__path__, "shardprep."):
        if not re.search("tf_inputs|_data$|torchvision|albumentations|__main__", module.name):
            import_module(module.name)
    waiting = [ShardprepError]
    while waiting:
        yield (kind := waiting.pop())
        waiting += kind.__subclasses__()


@pytest.mark.slow
def test_every_error_survives_pickling_and_being_made_of_a_message_as_pytorch_does() -> None:
    lines = "Caught it in a worker.\nOriginal Traceback (most recent call last):\n  a line\nits\x1b last line"
    for kind in every_error():
        error = kind(lines)
        error.path, error.key = "a path", "a key"
        again = pickle.loads(pickle.dumps(error))  # noqa: S301

        assert (type(again), vars(again)) == (kind, vars(error))
        assert str(again).splitlines() == lines.replace("\x1b", r"\x1b").splitlines()
