"""A Llama of random weights, built under `ratel.init` in little memory, hooked, and trained by `loss.backward()`.

Prints the seconds to build it, to write its training state and of each step, the bytes that a step moves, and the most
memory that the process had so far, against the limit. With `--vertical` the weights are saved then, and the same steps
are those of `ratel.open`, within the same limit; with `--plain`, of plain PyTorch with checkpointing in memory. Each is
in a process of its own. With `--planned` nothing is built: the plan says what a step would take.

    python -m scripts.bench.hooked [--layers 15] [--width 2048] [--tokens 64] [--limit 2GiB] [--steps 3] [--vertical]
                                   [--plain] [--planned]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ratel_cli as ratel
from ratel_cli.hardware.host import kept_bytes
from ratel_cli.model.cut.hooked import HookedModule, find_module_blocks
from ratel_cli.planning.search.horizontal import plan_horizontal
from ratel_cli.planning.time.traffic import Traffic, store_bytes
from ratel_cli.units import KIB, format_bytes, format_traffic, parse_bytes

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
    parser.add_argument("--vertical", action="store_true", help="then train it by ratel.open")
    parser.add_argument("--planned", action="store_true", help="only plan")
    parser.add_argument("--in-memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--saved", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.planned:
        planned(options)
        return
    if options.saved:
        vertical(options, Path(options.saved))
        return
    if options.in_memory:
        model = built(options)
        if torch.accelerator.is_available():
            torch.nn.Module.to(model, torch.accelerator.current_accelerator())
        print_row("plain step", train(model, options))
        return
    same = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "tokens", "steps", "limit")]
    again = [sys.executable, "-m", "scripts.bench.hooked", *same]
    with tempfile.TemporaryDirectory(dir=options.storage) as storage:
        hooked(options, Path(storage) / "hooked", Path(storage) / "saved")
        if options.vertical:
            shutil.rmtree(Path(storage) / "hooked")  # its state and another one may be more than the drive has
            subprocess.run([*again, f"--saved={storage}/saved"], check=True)
    if options.plain:
        subprocess.run([*again, "--in-memory"], check=True)


def hooked(options: argparse.Namespace, storage: Path, saved: Path) -> None:
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
        print_traffic(state.plan.traffic)
        if options.vertical:
            state.save(saved)


def planned(options: argparse.Namespace) -> None:
    """What `hook` would plan on an empty machine with one drive."""
    with torch.device("meta"):
        model = built(options)
    spec = HookedModule(model, find_module_blocks(model, None), outside=()).spec
    plan = plan_horizontal(
        spec,
        holds_gradients=False,
        has_sums=False,
        process_bytes=kept_bytes(),
        limit_bytes=parse_bytes(options.limit),
        num_drives=1,
        num_threads=1,
    )
    print(f"{sum(each.num_elements for each in spec.blocks) / 1e9:.2f}B parameters in fp32, limit {options.limit}")
    stored = format_traffic(store_bytes(spec, num_slots=2))
    print(f"at most {format_bytes(plan.memory.total)} of RAM; {stored} on the drive")
    print_traffic(plan.traffic)


def vertical(options: argparse.Namespace, saved: Path) -> None:
    began = perf_counter()
    limits = ratel.Limits(host_memory=options.limit)
    with ratel.open(saved, storage=[saved.parent / "opened"], dtype="float32", limits=limits) as model:
        print_row("open", perf_counter() - began)
        seconds = []
        for _ in range(options.steps):
            began = perf_counter()
            model.forward_backward({"input_ids": drawn(options)})
            model.step(learning_rate=1e-4)
            seconds.append(perf_counter() - began)
        print_row("vertical step", min(seconds))
        assert model.plan is not None
        print_traffic(model.plan.traffic)


def drawn(options: argparse.Namespace) -> torch.Tensor:
    """Tokens `[1, tokens]`."""
    return torch.randint(VOCABULARY, (1, options.tokens), generator=torch.Generator().manual_seed(0))


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
    tokens = drawn(options)
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


def print_traffic(traffic: Traffic) -> None:
    moved = format_traffic(traffic.read_bytes), format_traffic(traffic.written_bytes)
    print(f"{moved[0]} read and {moved[1]} written per step", flush=True)


if __name__ == "__main__":
    main()
