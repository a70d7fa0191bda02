"""Plain PyTorch with everything in memory, as a contestant of `scripts/bench/contestants.py`.

A step of it is the least that a step can cost: nothing has to be moved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.hardware.host import peak_resident_bytes
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
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # An adapter is in fp32 already, and is updated where it is.
    masters = [each if each.dtype == torch.float32 else nn.Parameter(each.detach().float()) for each in parameters]
    optimizers = [torch.optim.AdamW([master], lr=LEARNING_RATE, fused=True, weight_decay=0.0) for master in masters]
    seconds, losses = [], []
    for batches in batches_of(task):
        start = time.perf_counter()
        losses.append(_plain_gradients(model, [batch.to(device) for batch in batches]))
        if task.clip:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        with torch.no_grad():
            for parameter, master, optimizer in zip(parameters, masters, optimizers, strict=True):
                assert parameter.grad is not None
                if master is not parameter:
                    master.grad = parameter.grad.float()
                    parameter.grad = None
                optimizer.step()
                master.grad = None
                if master is not parameter:
                    parameter.copy_(master)
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


def _plain_gradients(model: PreTrainedModel, batches: Sequence[MicroBatch]) -> float:
    total, num_targets = 0.0, sum(batch.num_targets for batch in batches)
    for batch in batches:
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        flat, targets = logits.flatten(0, 1), batch.targets.flatten()
        loss = nn.functional.cross_entropy(flat.float(), targets, reduction="sum") / num_targets
        loss.backward()
        total += float(loss.detach())
    return total


if __name__ == "__main__":
    run_as(run_plain)
