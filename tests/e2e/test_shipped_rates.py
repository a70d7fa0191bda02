"""Ten configs that each of axolotl, LLaMA-Factory, TRL and torchtune ships: the steps of the run, its warm-up and its
learning rates are those of the tool.

The oracle is transformers' own code for the three tools that hand their numbers to its `Trainer`; what axolotl and
torchtune compute before or instead is written here from their sources, which are named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from ratel_cli.config.importing import import_config
from ratel_cli.config.load import dump, load_config
from ratel_cli.config.yaml.yaml_marks import Plain
from ratel_cli.run.inputs.length import learning_rates, num_steps
from tests.e2e.ported_configs import IMPOSSIBLE, PORTED

NUM_ROWS = 4848
"""Unpacked samples, in whole batches, since torchtune leaves out others."""


def _torchtune(model: str, optimizer: dict[str, Plain], accumulation: int, **more: Plain) -> dict[str, Plain]:
    return {
        "model": {"_component_": f"torchtune.models.{model}.{model}_8b"},
        "tokenizer": {"_component_": f"torchtune.models.{model}.{model}_tokenizer", "path": "t", "max_seq_len": 512},
        "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "m"},
        "dataset": {"_component_": "torchtune.datasets.alpaca_dataset"},
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        "optimizer": optimizer,
        "batch_size": 2,
        "epochs": 1,
        "gradient_accumulation_steps": accumulation,
        **more,
    }


_COSINE: dict[str, Plain] = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 100,
}
CONFIGS: Mapping[str, Mapping[str, object]] = {
    **{name: content for name, content in PORTED.items() if name not in IMPOSSIBLE},
    "torchtune: llama3/8B_full_single_device": _torchtune(
        "llama3", {"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 1e-5}, 1, lr_scheduler=_COSINE
    ),
    "torchtune: llama2/7B_full_low_memory": _torchtune(
        "llama2", {"_component_": "bitsandbytes.optim.PagedAdamW", "lr": 1e-5}, 1, lr_scheduler=_COSINE
    ),
    "torchtune: qwen3/0.6B_full_single_device": _torchtune(
        "qwen3", {"_component_": "torch.optim.AdamW", "lr": 2e-5}, 8
    ),
}
"""Of the last three what decides the length and the rates."""
TOOLS = ("axolotl", "LLaMA-Factory", "TRL", "torchtune")
TEN = [
    name
    for tool in TOOLS
    for name in [
        each for each in CONFIGS if each.startswith(f"{tool}:") and "cosine_min_lr_ratio" not in CONFIGS[each]
    ][:10]
]
Rates = Callable[[int], float]


def _number(value: object, default: float) -> float:
    return default if value is None else float(str(value))


def of_trainer(name: str, content: Mapping[str, object]) -> tuple[int, int, Rates]:
    """Steps, warm-up and rates of transformers' `Trainer`, with the defaults that the tool gives it.

    axolotl: the warm-up of `core/builders/base.py` (`_configure_warmup_and_logging`), the default rate schedule of
    `utils/schemas/training.py`. TRL: `trainer/sft_config.py`. LLaMA-Factory has no others than transformers.
    """
    is_axolotl = name.startswith("axolotl")
    batch = int(
        _number(content.get("micro_batch_size", content.get("per_device_train_batch_size")), 8 - 7 * is_axolotl)
    )
    each_step = int(_number(content.get("gradient_accumulation_steps"), 1))
    epochs = _number(content.get("num_epochs", content.get("num_train_epochs")), 1 if is_axolotl else 3)
    steps = math.ceil(epochs * math.ceil(math.ceil(NUM_ROWS / batch) / each_step))
    if _number(content.get("max_steps"), -1) > 0:
        steps = int(_number(content["max_steps"], 0))
    ratio, given = content.get("warmup_ratio"), content.get("warmup_steps")
    if is_axolotl:
        share = min(int(0.03 * steps), 100) if ratio is None else int(_number(ratio, 0) * steps)
        warmup = share if given is None else int(_number(given, 0))
        warmup = 2 if warmup == 1 else warmup
    else:  # a ratio is a number of steps below 1 for it
        share = _number(given if given is not None else ratio, 0)
        warmup = TrainingArguments("out", use_cpu=True, warmup_steps=share).get_warmup_steps(steps)
    peak = _number(content.get("learning_rate"), 2e-5 if name.startswith("TRL") else 5e-5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    kind = content.get("lr_scheduler", content.get("lr_scheduler_type", "cosine" if is_axolotl else "linear"))
    options = content.get("lr_scheduler_kwargs") or {}
    schedule = get_scheduler(str(kind), optimizer, warmup, steps, scheduler_specific_kwargs=dict(options))  # type: ignore[call-overload]
    [factor] = schedule.lr_lambdas
    return steps, warmup, lambda step: peak * factor(step)


def of_torchtune(content: Mapping[str, object]) -> tuple[int, int, Rates]:
    """Its own loop, `recipes/full_finetune_single_device.py` (`_steps_per_epoch`, `drop_last=True`), and
    `training/lr_schedulers.py` (`get_cosine_schedule_with_warmup`); without a schedule the rate stays."""
    batch = int(_number(content["batch_size"], 1))
    steps = int(_number(content["epochs"], 1)) * (
        NUM_ROWS // batch // int(_number(content.get("gradient_accumulation_steps"), 1))
    )
    optimizer, scheduler = content["optimizer"], content.get("lr_scheduler")
    assert isinstance(optimizer, dict)
    peak = float(optimizer["lr"])
    if not isinstance(scheduler, dict):
        return steps, 0, lambda step: peak
    warmup = int(scheduler["num_warmup_steps"])

    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step / warmup)
        progress = (step - warmup) / max(1, steps - warmup)
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))

    return steps, warmup, rate


def test_there_are_ten_of_each() -> None:
    assert [sum(name.startswith(f"{tool}:") for name in TEN) for tool in TOOLS] == [10, 10, 10, 10]


@pytest.mark.parametrize("name", TEN)
def test_its_steps_and_rates(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = CONFIGS[name]
    Path("theirs.yaml").write_text(dump(json.loads(json.dumps(content))))
    Path("run.yaml").write_text(import_config(Path("theirs.yaml")).text)
    config = load_config(Path("run.yaml")).config
    steps, warmup, rate = of_torchtune(content) if name.startswith("torchtune") else of_trainer(name, content)
    found = num_steps(config, math.ceil(NUM_ROWS / config.sequences_per_step))
    assert (found, config.num_warmup_steps(found)) == (steps, warmup)
    schedule = learning_rates(config, found)
    for step in (0, 1, 2, warmup, warmup + 1, steps // 3, steps // 2, steps - 1):
        assert schedule.at(step) == rate(step), step
