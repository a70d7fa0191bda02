"""The same run in transformers' Trainer and in Ratel: losses, learning rates, norms and weights, equal to the bit.

    .venv/bin/python examples/same_as_trainer.py
    .venv/bin/python examples/same_as_trainer.py --model granite --directory DIR

The models are tiny, with random weights, and the data is made on the spot, so nothing is downloaded. `Trainer` has its
model in memory. Ratel has it in a store on disk, and one layer at a time in memory. The exit code is 0 if everything
is equal. `--directory` keeps models, data, config and outputs.

Needs accelerate, as every Trainer does: the extra `examples` of Ratel has it
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

VOCABULARY = 512
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, int | bool]] = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "granite": {"tie_word_embeddings": True},
}
"""Architectures by transformers' names, and what else describes each of them."""
PROMPT_TOKENS = (8, 33)
ANSWER_TOKENS = 32
"""A step learns 4 answers, so 128 tokens. Trainer divides the loss of each micro-batch by that number and adds the
quotients in fp32; Ratel adds in fp64 and divides once. A power of two divides without rounding, so the two losses are
the same fp32 number. With any other number the losses that are printed may differ in their last bit; gradients and
weights are equal all the same."""

# Everything that decides the bits, once for Trainer and once for Ratel. Both sides also compute
# * on the CPU, with as many threads, because torch divides sums among them;
# * with the same attention: `sdpa`, and no attention mask, see `make_base`;
# * without dropout, which neither model has.


def train_with_trainer(base: Path, rows: Path, directory: Path) -> Trained:
    """Train `base` with transformers' Trainer, the model in memory. The output is in `directory`."""
    arguments = TrainingArguments(
        output_dir=str(directory),
        # Rows in the order of the file. Trainer shuffles by another rule than Ratel.
        train_sampling_strategy="sequential",
        per_device_train_batch_size=2,
        # Trainer divides the loss by the targets of the whole step, as Ratel does, if the model takes
        # `num_items_in_batch`. Qwen3 and Granite do. Otherwise it takes the mean of the micro-batches' means.
        gradient_accumulation_steps=2,
        max_steps=10,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        # Not Ratel's `warmup_ratio`, which is rounded down: Trainer rounds a share of the steps up.
        warmup_steps=2,
        # torch.optim.AdamW, a loop over parameters. The default, `adamw_torch_fused`, rounds differently: with it
        # 47 % of Qwen3's weights are equal to the bit after ten steps.
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        # Both leave out biases and norms.
        weight_decay=0.1,
        # Clips most steps of these runs, not all.
        max_grad_norm=1.0,
        # fp32 throughout. The guide explains what `bf16=True` would compute, and what `dtype: bfloat16`.
        bf16=False,
        use_cpu=True,
        dataloader_pin_memory=False,
        # What follows decides no bits.
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=arguments,
        train_dataset=read_rows(rows),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(directory))
    logged = [line for line in trainer.state.log_history if "loss" in line]
    return Trained(
        steps=[Step(loss=line["loss"], rate=line["learning_rate"], norm=line["grad_norm"]) for line in logged],
        weights=load_file(directory / "model.safetensors"),
    )


CONFIG = """\
base_model: {base}
datasets:
  - path: {rows}
    type: tokens                  # input_ids and labels, as Trainer takes them
shuffle: false                    # rows in the order of the file
sample_packing: false             # one row per sequence, padded to the longest of its micro-batch
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 2
max_steps: 10
learning_rate: 1e-2
lr_scheduler: cosine
warmup_steps: 2
optimizer: adamw
adam_beta1: 0.9
adam_beta2: 0.999
adam_epsilon: 1e-8
weight_decay: 0.1
max_grad_norm: 1.0
dtype: float32
attn_implementation: sdpa
device: cpu
output_dir: {output}
storage:
  paths: [{store}]                # all model state is here, on disk
"""


def train_with_ratel(base: Path, rows: Path, directory: Path, finetune: Callable[[Path], None]) -> Trained:
    """Train `base` with `ratel finetune CONFIG`. The output is in `directory`, and config and store are next to it."""
    config, store = directory.with_suffix(".yaml"), directory.with_suffix(".store")
    config.write_text(CONFIG.format(base=base, rows=rows, output=directory, store=store), encoding="utf-8")
    finetune(config)
    lines = (directory / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    return Trained(
        steps=[
            Step(loss=_as_fp32(line["loss"]), rate=line["learning_rate"], norm=line["grad_norm"]) for line in logged
        ],
        weights=load_file(directory / "model.safetensors"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a trainer logs of one step; `norm` is the gradient norm before clipping."""

    loss: float
    rate: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One finished run."""

    steps: Sequence[Step]
    weights: dict[str, torch.Tensor]
    """As they are in the output directory, by name."""


def make_base(name: str, directory: Path) -> None:
    """Save a tiny model with random weights, and a tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE, **MODELS[name])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({f"t{number}": number for number in range(VOCABULARY)}, unk_token="t0")),
        pad_token="t0",
        eos_token="t2",
        # No attention mask: padding is on the right, where causal attention never looks. With a mask torch's attention
        # takes its sums in another order: 35 % of Qwen3's weights are equal to the bit then.
        model_input_names=["input_ids"],
    ).save_pretrained(directory)


def make_rows(path: Path) -> None:
    """Write prompts of 8 to 32 tokens and their answers of 32 tokens. The answers are learned, the prompts are not."""
    draws = torch.Generator().manual_seed(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(40):
            num_prompt = int(torch.randint(*PROMPT_TOKENS, (), generator=draws))
            first, stride = torch.randint(1, 30, (2,), generator=draws).tolist()
            tokens = [3 + (first + place * stride) % 31 for place in range(num_prompt + ANSWER_TOKENS)]
            labels = [-100] * num_prompt + tokens[num_prompt:]
            file.write(json.dumps({"input_ids": tokens, "labels": labels}) + "\n")


def read_rows(path: Path) -> list[dict[str, list[int]]]:
    """The rows of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ratel_finetune(config: Path) -> None:
    """Run the program `ratel`, as a user does. Raises SystemExit with its output if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [str(Path(sys.executable).with_name("ratel")), "finetune", str(config)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{ended.stderr}\n{' '.join(command)} ended with exit code {ended.returncode}")


def run_both(name: str, directory: Path, finetune: Callable[[Path], None] = ratel_finetune) -> tuple[Trained, Trained]:
    """Make a model and its data in `directory`, and train it twice: with Trainer, and with Ratel."""
    directory.mkdir(parents=True)
    base, rows = directory / "base", directory / "rows.jsonl"
    make_base(name, base)
    make_rows(rows)
    return (
        train_with_trainer(base, rows, directory / "trainer"),
        train_with_ratel(base, rows, directory / "ratel", finetune),
    )


def table(trainer: Trained, ratel: Trained) -> Iterator[str]:
    """Every step as both report it, and how many weights are equal."""
    yield f"{'':8}{'Trainer':31}    Ratel"
    columns = f"{'loss':>9}  {'rate':>9}  {'norm':>9}"
    yield f"{'step':6}{columns}    {columns}    equal"
    for number, (one, other) in enumerate(zip(trainer.steps, ratel.steps, strict=True), start=1):
        yield f"{number:>4}  {_columns(one)}    {_columns(other)}    {'yes' if one == other else 'NO'}"
    yield f"weights: {num_equal(trainer, ratel):,} of {num_weights(trainer):,} equal to the bit"


def is_equal(trainer: Trained, ratel: Trained) -> bool:
    """Whether all losses, rates, norms and weights are equal, to the bit."""
    return list(trainer.steps) == list(ratel.steps) and num_equal(trainer, ratel) == num_weights(trainer)


def num_weights(trained: Trained) -> int:
    """Number of weights in a model."""
    return sum(weight.numel() for weight in trained.weights.values())


def num_equal(one: Trained, other: Trained) -> int:
    """Number of weights whose fp32 bits are the same in both models, which must have the same tensors."""
    assert one.weights.keys() == other.weights.keys()
    pairs = ((weight, other.weights[name]) for name, weight in one.weights.items())
    return sum(int((a.view(torch.int32) == b.view(torch.int32)).sum()) for a, b in pairs)


def _columns(step: Step) -> str:
    return f"{step.loss:9.6f}  {step.rate:9.2e}  {step.norm:9.6f}"


def _as_fp32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. Returns 0 if everything is equal, else 1."""
    parser = argparse.ArgumentParser(description="The same run in transformers' Trainer and in Ratel, compared.")
    parser.add_argument("--model", choices=[*MODELS], action="append", help="one of the models; default: all")
    parser.add_argument("--directory", type=Path, help="a new directory to keep everything in; default: none is kept")
    options = parser.parse_args(arguments)
    if options.directory and options.directory.exists():
        parser.error(f"{options.directory} exists; name a new directory")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the models are tiny
    everything_equal = True
    with tempfile.TemporaryDirectory() as temporary:
        parent = options.directory or Path(temporary)
        for name in options.model or MODELS:
            trainer, ratel = run_both(name, parent / name)
            print(f"{name}: {num_weights(trainer):,} weights in fp32; 10 steps of 2 micro-batches of 2 rows")
            print(*table(trainer, ratel), "", sep="\n")
            everything_equal &= is_equal(trainer, ratel)
    print("Trainer and Ratel are equal to the bit." if everything_equal else "Trainer and Ratel DIFFER.")
    return 0 if everything_equal else 1


if __name__ == "__main__":
    sys.exit(main())
