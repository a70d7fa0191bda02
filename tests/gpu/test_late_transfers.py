"""A GPU computes with the newest weights however late reads and updates end: its window waits for them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.optimizer.groups import GroupWork
from ratel_cli.planning.profile.placement import Placement
from tests.engine.exactness import check_training
from tests.fakes import Fault, FaultyQueue
from tests.gpu.machine import NEEDS_GPU, gpu_config, gpu_machine
from tests.reference import Recipe

pytestmark = NEEDS_GPU
WINDOW = Placement(prefetch_blocks=2, pending_updates=2, gpu_window_bytes=1 << 30)
LATE_SECONDS = 0.01


def test_what_is_read_late(tmp_path: Path) -> None:
    recipe = Recipe(dtype=torch.bfloat16)
    late = Fault(delay_seconds=LATE_SECONDS)
    with FaultyQueue(from_call=20, lasting=late) as queue:
        check_training(gpu_machine, tmp_path, gpu_config("llama"), recipe, placement=WINDOW, queue=queue)


def test_what_is_updated_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The updates of a clipped step begin in the next one's forward."""
    compute = GroupWork.compute

    def compute_late(*arguments: object) -> None:
        time.sleep(LATE_SECONDS)
        compute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(GroupWork, "compute", compute_late)
    recipe = Recipe(dtype=torch.bfloat16, max_grad_norm=1e-3)
    check_training(gpu_machine, tmp_path, gpu_config("llama"), recipe, num_steps=3, placement=WINDOW)
