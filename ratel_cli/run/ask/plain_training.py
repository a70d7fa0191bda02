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
    """A model on its device, with fp32 master weights where it is not in fp32 itself, and AdamW.

    Gradients are summed in the model's dtype, and the update is torch's fused one, which is the fastest.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learning_rate: float,
        masters_on: torch.device | None = None,
        is_fused: bool = True,
    ) -> None:
        """`masters_on`: where master weights are and the update runs; the model's device by default."""
        self.model, self.device = model, model.device
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._masters = [
            nn.Parameter(each.detach().to(masters_on or model.device, torch.float32)) for each in self._parameters
        ]
        # One optimizer for each parameter, so that no fp32 copy of all gradients is needed.
        self._optimizers = [
            torch.optim.AdamW([each], lr=learning_rate, weight_decay=0.0, fused=is_fused) for each in self._masters
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
            self._add_up()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, max_grad_norm)
        for parameter, master, optimizer in zip(self._parameters, self._masters, self._optimizers, strict=True):
            self._update(parameter, master, optimizer)
        return total / num_targets

    def _add_up(self) -> None:
        """Take the gradients of a micro-batch; autograd has added them to those before."""

    def _gradient(self, parameter: nn.Parameter, master: nn.Parameter) -> torch.Tensor:  # noqa: ARG002
        """The sum of a parameter's gradients in fp32, which is taken from it."""
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.float(), None
        return gradient

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter, master: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        master.grad = self._gradient(parameter, master)
        optimizer.step()
        master.grad = None
        if master.data_ptr() != parameter.data_ptr():
            parameter.copy_(master)


class ExactTraining(PlainTraining):
    """Plain training with gradients summed in fp32 and torch's own AdamW on the CPU: the bits that a run must have.

    The fused update rounds a few weights otherwise.
    """

    def __init__(self, model: PreTrainedModel, *, learning_rate: float) -> None:
        super().__init__(model, learning_rate=learning_rate, masters_on=torch.device("cpu"), is_fused=False)

    def _add_up(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            gradient = super()._gradient(parameter, master).to(master.device)
            master.grad = gradient if master.grad is None else master.grad + gradient

    def _gradient(self, parameter: nn.Parameter, master: nn.Parameter) -> torch.Tensor:
        assert master.grad is not None
        return master.grad.to(parameter.dtype).float()  # a sum is rounded once


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
        training = (ExactTraining if is_exact else PlainTraining)(model, learning_rate=config.learning_rate)
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
