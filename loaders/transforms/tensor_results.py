"""What libraries of transforms return, as NumPy arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np


def in_arrays(result: Any) -> Any:
    """Return tensors and PIL images as arrays, in tuples, lists and dicts too; anything else unchanged.

    A tensor's memory is shared. NumPy has no bfloat16: its tensors become uint16 with the same bits.
    """
    if isinstance(result, dict):
        return {name: in_arrays(part) for name, part in result.items()}
    if isinstance(result, tuple | list):
        return type(result)(map(in_arrays, result))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(result, torch.Tensor):
        return _of_tensor(torch, result.detach().as_subclass(torch.Tensor))
    is_picture = hasattr(result, "__array_interface__") and not isinstance(result, np.ndarray | np.generic)
    return np.asarray(result) if is_picture else result


def _of_tensor(torch: Any, tensor: Any) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()
