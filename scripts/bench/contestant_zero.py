"""DeepSpeed's ZeRO-Infinity, as a contestant of `scripts/bench/contestants.py`.

It is the usual way to train with states on NVMe. `zero` has bf16 parameters and the optimizer's states on NVMe,
`zero-optimizer` only the states. Both recompute activations. DeepSpeed is not among our requirements; `_INSTALL` lists
what to install. It runs with its defaults except for `_settings`: each of those makes it faster or smaller, or is
necessary for it to run.

Invariant: initial weights, batches and loss are those of `plain`, so its losses must follow plain's.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.hardware.host import peak_resident_bytes
from scripts.bench.contestants import LEARNING_RATE, Measured, Task, batches_of, model_config, run_as

_INSTALL = (
    "DeepSpeed is not installed. It takes `pip install deepspeed ninja`, a C++ compiler and, for its "
    "asynchronous I/O, the headers of libaio (Debian: libaio-dev)"
)
_SUB_GROUP_ELEMENTS = 50_000_000
"""Parameters updated at a time. With the default of 10^9 all states of a small model would be in memory at once."""
_BUFFERS = 16
"""Buffers for parameters, each as large as the largest one. The default is 5, but a layer of Llama has 7 matrices."""
_UPDATE_BUFFERS = 12
"""Buffers for weights, moments and gradient of three groups: one is read, one updated, one written. The default of 4
is for one group."""


def run_zero(task: Task) -> Measured:
    """Train with DeepSpeed's engine, in one process and without a launcher."""
    if task.lora or task.dtype != "bfloat16":
        sys.exit("DeepSpeed's contestants train all weights, in bf16")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = model_config(task)
    assert isinstance(config, LlamaConfig)
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.train()
    # Without reentry, parameters on NVMe are silently wrong: loss 4.05 where plain has 0.35 (DeepSpeed 0.19.8).
    model.gradient_checkpointing_enable({"use_reentrant": True})
    num_elements = [parameter.numel() for parameter in model.parameters()]
    seconds, losses = [], []
    with tempfile.TemporaryDirectory(dir=task.directory) as directory:
        engine = _open_engine(task, model, Path(directory), largest_elements=max(num_elements))
        for batches in batches_of(task):
            start = time.perf_counter()
            losses.append(_step(engine, batches))
            seconds.append(time.perf_counter() - start)
    torch.distributed.destroy_process_group()
    return Measured(
        num_parameters=sum(num_elements),
        step_seconds=seconds[task.warm_up :],
        losses=losses,
        peak_bytes=peak_resident_bytes(),
    )


class _Engine(Protocol):
    """The part of DeepSpeed's engine that is used here. DeepSpeed has no types."""

    def __call__(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool
    ) -> CausalLMOutputWithPast: ...

    def backward(self, loss: torch.Tensor) -> None: ...

    def step(self) -> None: ...


def _open_engine(task: Task, model: nn.Module, directory: Path, *, largest_elements: int) -> _Engine:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DS_ACCELERATOR="cpu")
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
    deepspeed = importlib.import_module("deepspeed")
    optimizer = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, adamw_mode=True
    )
    engine: _Engine = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_settings(task, directory, largest_elements=largest_elements)
    )[0]
    return engine


def _settings(task: Task, directory: Path, *, largest_elements: int) -> dict[str, object]:
    nvme = {"device": "nvme", "nvme_path": str(directory)}
    zero: dict[str, object] = {
        "stage": 3,
        "offload_optimizer": {**nvme, "pipeline_read": True, "pipeline_write": True, "buffer_count": _UPDATE_BUFFERS},
        "sub_group_size": _SUB_GROUP_ELEMENTS,
    }
    if task.contestant == "zero":
        zero["offload_param"] = {**nvme, "buffer_size": largest_elements, "buffer_count": _BUFFERS, "max_in_cpu": 0}
        # By default all parameters of a model below 10^9 stay in memory once used, until the buffers run out: an error.
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": task.micro_batches,
        "gradient_clipping": 1.0 if task.clip else 0.0,
        "bf16": {"enabled": True},
        "aio": {"intra_op_parallelism": 4},
        "zero_optimization": zero,
    }


def _step(engine: _Engine, batches: Sequence[MicroBatch]) -> float:
    """DeepSpeed divides each loss by the number of micro-batches; the last micro-batch's `step` is the update."""
    total, num_targets = 0.0, sum(batch.num_targets for batch in batches)
    for batch in batches:
        logits = engine(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        assert logits is not None
        loss = nn.functional.cross_entropy(logits[0].float(), batch.targets[0], reduction="sum") / num_targets
        engine.backward(loss * len(batches))
        engine.step()
        total += float(loss.detach())
    return total


if __name__ == "__main__":
    if find_spec("deepspeed") is None:
        sys.exit(_INSTALL)
    run_as(run_zero)
