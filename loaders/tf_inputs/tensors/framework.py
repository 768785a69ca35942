"""The import of TensorFlow for all modules of this folder."""

from __future__ import annotations

try:
    import tensorflow as tf
except ModuleNotFoundError as error:
    raise ImportError("TensorFlow is not installed; pip install 'shardprep[tensorflow]'") from error

__all__ = ["tf"]
