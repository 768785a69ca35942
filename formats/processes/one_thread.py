"""Libraries limited to one thread, in a process that is one of several."""

from __future__ import annotations

import sys


def use_one_thread() -> None:
    """Have OpenCV and PyTorch compute in the calling thread only, where they were imported."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
