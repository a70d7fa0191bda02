"""Which backward autograd runs at this moment."""

from __future__ import annotations

import torch


def running_backward() -> int | None:
    """The number of the backward that calls this; None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number
