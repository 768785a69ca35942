"""A hint within Keras' error for data that it does not take."""

from __future__ import annotations

import sys
from typing import ClassVar


class KerasHint:
    """Base of iterables over batches; where Keras is imported, ``str`` names what ``model.fit`` takes.

    Keras accepts no other iterables than its own, and its error contains the text of what it was given.
    """

    for_keras: ClassVar[str] = "shardprep.loaders.tf_inputs.to_dataset() of it"

    def __str__(self) -> str:
        return f"{self!r}; Keras takes {self.for_keras}" if "keras" in sys.modules else repr(self)
