"""Plain PyTorch with everything in memory, as a contestant of `scripts/bench/contestants.py`.

A step of it is the least that a step can cost: nothing has to be moved. `ratel bench` compares with the same loop.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.hardware.host import peak_resident_bytes
from ratel_cli.run.ask.plain_training import PlainTraining
from scripts.bench.contestants import LEARNING_RATE, Measured, Task, batches_of, model_config, run_as


def run_plain(task: Task) -> Measured:
    """Train with 16 bytes per parameter and the activations in memory."""
    device = compute_device(task.device)
    with nullcontext() if device.type == "cpu" else determinism(True, device, notice=print):  # as Ratel does
        return _train(task, device)


def _train(task: Task, device: torch.device) -> Measured:
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, task.dtype))
    with device:
        model = AutoModelForCausalLM.from_config(model_config(task))
    torch.set_default_dtype(torch.float32)
    model.train()
    if task.contestant == "plain":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if task.lora:
        config = LoraConfig(r=task.lora, lora_alpha=2 * task.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        get_peft_model(model, config)  # puts its modules into the model
    training = PlainTraining(model, learning_rate=LEARNING_RATE)
    seconds, losses = [], []
    for batches in batches_of(task):
        start = time.perf_counter()
        tensors = [({"input_ids": each.input_ids, "position_ids": each.position_ids}, each.targets) for each in batches]
        losses.append(training.step(tensors, max_grad_norm=1.0 if task.clip else None))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return Measured(
        num_parameters=model.num_parameters(),
        step_seconds=seconds[task.warm_up :],
        losses=losses,
        peak_bytes=peak_resident_bytes(),
        gpu_peak_bytes=torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else 0,
    )


if __name__ == "__main__":
    run_as(run_plain)
