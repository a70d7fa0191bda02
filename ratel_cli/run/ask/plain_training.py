"""Plain PyTorch with the whole model in memory: what `ratel bench` compares a run with.

    python -m ratel_cli.run.ask.plain_training CONFIG [checkpointing] [exact]

trains as a run's CONFIG says, in a process of its own, and prints what it measured as one line of JSON.

Invariant: this is the loop of docs/guide/exactness.md as anyone would write it, with nothing of Ratel's engine in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.hardware.host import peak_resident_bytes
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.report.words.bench import BenchTraining
from ratel_cli.sizes import IGNORED_TARGET

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""What the model gets by name, and the targets, int64 `[batch, tokens]`: next tokens, -100 where there is no loss."""


class PlainTraining:
    """A model on its device, with fp32 master weights where it is not in fp32 itself, and AdamW."""

    def __init__(self, model: PreTrainedModel, *, learning_rate: float, is_exact: bool = False) -> None:
        """`is_exact`: sum gradients in fp32 and update on the CPU by torch's own AdamW, whose bits a run must have.

        Otherwise gradients are summed in the model's dtype, and the update is torch's fused one, which is faster and
        rounds a few weights otherwise.
        """
        self.model, self.device, self._is_exact = model, model.device, is_exact
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        place = torch.device("cpu") if is_exact else model.device
        self._masters = [nn.Parameter(each.detach().to(place, torch.float32)) for each in self._parameters]
        # One optimizer for each parameter, so that no fp32 copy of all gradients is needed.
        self._optimizers = [
            torch.optim.AdamW([each], lr=learning_rate, weight_decay=0.0, fused=not is_exact) for each in self._masters
        ]

    def step(self, batches: Sequence[Batch], *, max_grad_norm: float | None = None) -> float:
        """Train on the micro-batches of one step. Returns the mean loss of their targets."""
        num_targets = sum(int((targets != IGNORED_TARGET).sum()) for _, targets in batches)
        total = 0.0
        for inputs, targets in batches:
            placed = {name: each.to(self.device) for name, each in inputs.items()}
            logits = self.model(**placed, use_cache=False).logits.flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, targets.to(self.device).flatten(), reduction="sum")
            (loss / num_targets).backward()
            total += float(loss.detach())
            if self._is_exact:
                self._add_up()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, max_grad_norm)
        for parameter, master, optimizer in zip(self._parameters, self._masters, self._optimizers, strict=True):
            self._update(parameter, master, optimizer)
        return total / num_targets

    def _add_up(self) -> None:
        """Add the gradients of a micro-batch to their fp32 sums."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.to(master.device, torch.float32)
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, master: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_exact:
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        else:
            assert master.grad is not None
            master.grad = master.grad.to(parameter.dtype).float()  # a sum is rounded once
        optimizer.step()
        master.grad = None
        if master.data_ptr() != parameter.data_ptr():
            parameter.copy_(master)


def train_plainly(config: RunConfig, *, checkpointing: bool, is_exact: bool) -> BenchTraining:
    """Train on the rows of the config's file in their order, with its model, split, rate and dtype.

    `checkpointing`: backward recomputes the layers.
    """
    device, directory = compute_device(config.device), config.base_model
    assert directory is not None
    with nullcontext() if device.type == "cpu" else determinism(True, device, notice=print):  # as a run does
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[config.dtype])
        for parameter in model.parameters():  # in a mapped file a matrix may begin where products round otherwise
            parameter.data = parameter.data.clone()
        nn.Module.to(model.train(), device)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        training = PlainTraining(model, learning_rate=config.learning_rate, is_exact=is_exact)
        (num_rows, num_batches), seconds, losses = config.known_split, [], []
        with Path(config.datasets[0].path).open(encoding="utf-8") as file:
            for _ in range(config.max_steps or 0):
                batches = [_batch(list(islice(file, num_rows))) for _ in range(num_batches)]
                start = time.perf_counter()
                losses.append(training.step(batches))
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                seconds.append(time.perf_counter() - start)
        return BenchTraining(
            step_seconds=seconds,
            losses=losses,
            peak_bytes=peak_resident_bytes(),
            gpu_peak_bytes=torch.accelerator.max_memory_allocated(device) if device.type != "cpu" else 0,
        )


def _batch(lines: Sequence[str]) -> Batch:
    ids = torch.tensor([json.loads(line)["input_ids"] for line in lines])
    return {"input_ids": ids}, nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED_TARGET)


if __name__ == "__main__":
    found = train_plainly(
        load_config(Path(sys.argv[1])).config, checkpointing="checkpointing" in sys.argv, is_exact="exact" in sys.argv
    )
    print(json.dumps(asdict(found)))
