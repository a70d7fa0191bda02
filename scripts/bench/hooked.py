"""A Llama of random weights, built under `ratel.init` in little memory, hooked, and trained by `loss.backward()`.

Prints the seconds to build it, to write its training state and of each step, the bytes that a step moves, and the most
memory that the process had so far, against the limit. With `--plain` plain PyTorch trains the same model with
checkpointing in memory, in a process of its own, and the seconds of its steps stand next to these.

    python -m scripts.bench.hooked [--layers 15] [--width 2048] [--tokens 64] [--limit 2GiB] [--steps 3] [--plain]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ratel_cli as ratel
from ratel_cli.units import KIB, format_bytes, format_traffic

VOCABULARY = 8192


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", default="2GiB", help="of host memory")
    parser.add_argument("--storage", help="a directory for the training state; a temporary one if it is not given")
    parser.add_argument("--plain", action="store_true", help="compare with plain PyTorch with checkpointing")
    parser.add_argument("--in-memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_memory:
        model = built(options)
        if torch.accelerator.is_available():
            torch.nn.Module.to(model, torch.accelerator.current_accelerator())
        print_row("plain step", train(model, options))
        return
    with tempfile.TemporaryDirectory(dir=options.storage) as storage:
        hooked(options, Path(storage))
    if options.plain:
        same = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "tokens", "steps")]
        subprocess.run([sys.executable, "-m", "scripts.bench.hooked", "--in-memory", *same], check=True)


def hooked(options: argparse.Namespace, storage: Path) -> None:
    began = perf_counter()
    with ratel.init(storage=[storage], limits=ratel.Limits(host_memory=options.limit)):
        model = built(options)
        num_parameters = sum(each.numel() for each in model.parameters())
        print(f"{num_parameters / 1e9:.2f}B parameters in fp32, limit {options.limit}", flush=True)
        print_row("build", perf_counter() - began)
        began = perf_counter()
        state = ratel.hook(model)
        print_row("write the state", perf_counter() - began)
    with state:
        ratel.AdamW(model, lr=1e-4, weight_decay=0.0)
        print_row("step", train(model, options))
        traffic = state.plan.traffic
        print(
            f"{format_traffic(traffic.read_bytes)} read and {format_traffic(traffic.written_bytes)} written per step",
            flush=True,
        )


def built(options: argparse.Namespace) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, options: argparse.Namespace) -> float:
    """The seconds of the fastest step."""
    optimizer = None
    if options.in_memory:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    tokens = torch.randint(VOCABULARY, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    seconds = []
    tokens = tokens.to(next(model.parameters()).device)
    for _ in range(options.steps):
        began = perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        seconds.append(perf_counter() - began)
    return min(seconds)


def print_row(what: str, seconds: float) -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak_bytes = int(status["VmHWM"].split()[0]) * KIB
    print(f"{what:16} {seconds:8.2f} s   at most {format_bytes(peak_bytes)} until then", flush=True)


if __name__ == "__main__":
    main()
