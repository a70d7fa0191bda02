"""Prints the table of common cases of README.md: what `ratel plan` predicts for known models on a desktop with 24 GB.

    python -m scripts.common_cases                     all rows
    python -m scripts.common_cases Qwen3-14B           the rows of this model

The models are configurations only, of the shapes that their makers published. The machine is that of
configs/hardware/paper-4090-2ssd.yaml (one RTX 4090, two drives of 6.5 GB/s read and 3.4 GB/s written) with the
processor and the memory of a desktop, see `machine`.

Invariant: each figure is one that `ratel plan --json` prints for that model and that machine. No weights are read, and
nothing is measured: costs come from the shapes. A row takes half a minute on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from ratel_cli.cli.app import main as ratel
from ratel_cli.units import format_seconds, format_traffic

ROOT = Path(__file__).parents[1]
BASE_MACHINE = ROOT / "configs" / "hardware" / "paper-4090-2ssd.yaml"
SEQUENCE_LEN, TOKENS_PER_STEP = 2048, 65_536
RAM_GIB = (64, 128)
HEAD = ("model", "RAM", "a step", "tokens/s", "disk", "written per step")
_GIB = 1 << 30
_SYSTEM_GIB = 4
"""Host memory that the system and the desktop take."""
_LLAMA_ROPE: Mapping[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(*, hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> PretrainedConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128_256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_parameters=dict(_LLAMA_ROPE),
        tie_word_embeddings=False,
    )


def _qwen3(*, intermediate_size: int, num_layers: int, num_heads: int) -> PretrainedConfig:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=151_936,
        hidden_size=5120,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    )


def models() -> dict[str, PretrainedConfig]:
    """The configuration of each model, by name."""
    return {
        "Llama-3.1-8B": _llama(hidden_size=4096, intermediate_size=14_336, num_layers=32, num_heads=32),
        "Qwen3-14B": _qwen3(intermediate_size=17_408, num_layers=40, num_heads=40),
        "Qwen3-32B": _qwen3(intermediate_size=25_600, num_layers=64, num_heads=64),
        "Llama-3.1-70B": _llama(hidden_size=8192, intermediate_size=28_672, num_layers=80, num_heads=64),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What `ratel plan` predicts for one model with so much RAM."""

    model: str
    ram_gib: int
    num_parameters: int
    step_seconds: float
    tokens_per_second: float
    disk_bytes: int
    written_bytes_per_step: int

    def cells(self) -> tuple[str, ...]:
        """The cells of the table, below `HEAD`. Disk and writes are in the units of drives: 1 GB is 10^9 bytes."""
        return (
            self.model,
            f"{self.ram_gib} GB",
            format_seconds(self.step_seconds),
            f"{self.tokens_per_second:.0f}",
            format_traffic(self.disk_bytes),
            format_traffic(self.written_bytes_per_step),
        )


def machine(ram_gib: int) -> dict[str, object]:
    """The content of a hardware file: a desktop with 16 cores and two channels of memory.

    Main memory has the rate that Ratel measured on a Xeon in November 2026, 51.8 GB/s, which is about what
    two channels of DDR5 reach. AdamW has the base machine's rate of one core.
    """
    read: dict[str, object] = yaml.safe_load(BASE_MACHINE.read_text(encoding="utf-8"))
    host = dict(read["host"]) if isinstance(read["host"], dict) else {}
    host["num_cores"] = 16
    host["memory_bytes"] = ram_gib * _GIB
    host["available_bytes"] = (ram_gib - _SYSTEM_GIB) * _GIB
    host["memory_bytes_per_second"] = 51_800_000_000
    return {**{key: value for key, value in read.items() if key != "prices"}, "host": host}


def planned(model: str, ram_gib: int) -> Row:
    """Run `ratel plan --json` for that model and that machine. Raises RuntimeError if it does not fit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models()[model].save_pretrained(folder / model)
        (folder / "hardware.yaml").write_text(yaml.safe_dump(machine(ram_gib)), encoding="utf-8")
        config = {
            "base_model": str(folder / model),
            "datasets": "train.jsonl",
            "sequence_len": SEQUENCE_LEN,
            "tokens_per_step": TOKENS_PER_STEP,
            "output_dir": str(folder / "output"),
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = ratel(["plan", str(folder / "run.yaml"), "--hardware", str(folder / "hardware.yaml"), "--json"])
    if code != 0:
        raise RuntimeError(f"{model} with {ram_gib} GiB: ratel plan ended with exit code {code}")
    plan = json.loads(printed.getvalue())
    return Row(
        model=model,
        ram_gib=ram_gib,
        num_parameters=plan["model"]["num_parameters"],
        step_seconds=plan["time"]["step_seconds"],
        tokens_per_second=plan["throughput"]["tokens_per_second"],
        disk_bytes=plan["memory"]["nvme_bytes"],
        written_bytes_per_step=plan["traffic"]["nvme_written_bytes"],
    )


def table_line(cells: Sequence[str]) -> str:
    """One line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help="only these models")
    chosen = parser.parse_args(arguments).models or list(models())
    unknown = [name for name in chosen if name not in models()]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; the models are {', '.join(models())}")
    sys.stdout.write(f"{table_line(HEAD)}\n|{'---|' * len(HEAD)}\n")
    for model in chosen:
        for ram_gib in RAM_GIB:
            sys.stdout.write(table_line(planned(model, ram_gib).cells()) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
