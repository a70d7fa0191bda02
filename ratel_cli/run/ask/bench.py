"""Measures what a run of Ratel costs on this machine, next to plain PyTorch, for `ratel bench`.

    1. rates    the machine, as `ratel profile` measures it
    2. layer    forward and backward of one layer, on whole rows and on packed ones
    3. losses   plain PyTorch as docs/guide/exactness.md states it: the losses that a run must have
    4. rounds   plain PyTorch, the same with checkpointing, and `ratel finetune`, in turns, until the time is over

Each training has a process of its own, which has its own peak memory, and all of them read the same weights and the
same tokens, both random. Times are medians over the steps of all rounds, without the first and the last step of each.

Invariant: everything lies in folders that are removed at the end, caches included.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ratel_cli.console import RunLog
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.budget import BRIEF, FULL
from ratel_cli.hardware.host import gpu_names
from ratel_cli.report.words.bench import CHECKPOINTING, PLAIN, RATEL, BenchReport, BenchTraining
from ratel_cli.run.ask.environment import environment_of
from ratel_cli.run.ask.profile_model import measure_model
from ratel_cli.run.files.profile_cache import profile_target
from ratel_cli.run.files.run_directory import METRICS_NAME, PLAN_NAME, read_config
from ratel_cli.run.inputs.base_kinds import build_model
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.settings import as_recorded
from ratel_cli.run.train.profile_machine import measure_machine
from ratel_cli.training.history import read_history
from ratel_cli.units import format_seconds


def llama_shape(
    hidden: int, intermediate: int, *, layers: int, heads: int, kv_heads: int, vocab: int, **others: int
) -> dict[str, int]:
    """A Llama's shape in the keys of its config.json, and others of models like it."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        **others,
    }


def _steps(rows: int, row_tokens: int, *, micro_batches: int = 1, steps: int, **limits: str) -> dict[str, object]:
    """Config keys for `steps` steps, each of `micro_batches` micro-batches of `rows` rows with `row_tokens` tokens."""
    split = {"micro_batch_size": rows, "sequence_len": row_tokens, "gradient_accumulation_steps": micro_batches}
    return {**split, "max_steps": steps, "limits": limits}


SIZES: Final = {
    "tiny": (llama_shape(64, 128, layers=2, heads=4, kv_heads=2, vocab=512), _steps(1, 32, micro_batches=2, steps=4)),
    "small": (
        llama_shape(512, 1408, layers=8, heads=8, kv_heads=8, vocab=8192),
        _steps(2, 512, steps=6, host_memory="1GiB"),
    ),
    "1b": (
        llama_shape(2048, 5632, layers=22, heads=32, kv_heads=4, vocab=32000),
        _steps(4, 2048, micro_batches=8, steps=4),
    ),
}
"""By name, the shape of a model, and the steps that train it: `small` on two cores, `1b` on a GPU of 24 GB."""
PACKED: Final = 4
"""Samples in a packed row."""


def run_bench(size: str | None, storage: Sequence[Path], log: RunLog, *, seconds: float) -> BenchReport:
    """Measure everything. `storage`: a directory on each drive. `seconds`: no round begins that would end later.

    Raises RatelError.
    """
    end = time.perf_counter() + seconds
    prepare_process()
    size = size or ("1b" if gpu_names() else "small")
    with ExitStack() as folders:
        places = [Path(folders.enter_context(TemporaryDirectory(prefix="ratel-bench-", dir=each))) for each in storage]
        bench = _Bench(size, places, log)
        config = bench.config
        hardware = measure_machine(profile_target(config, places), log, budget=BRIEF if size == "tiny" else FULL)
        log.say("measuring a layer on whole rows and on packed ones")
        model = build_model(config)
        profiles = {
            name: measure_model(config, model, hardware, log, num_samples=number)
            for name, number in (("layer", 1), ("packed", PACKED))
        }
        log.say("computing the losses of plain PyTorch")
        exact = bench.plain("checkpointing", "exact")
        if exact is None:
            raise _does_not_fit("plain PyTorch")
        return BenchReport(
            environment=environment_of(places),
            hardware=hardware,
            size=size,
            num_parameters=model.spec.num_parameters,
            dtype=config.dtype,
            tokens_per_step=config.sequences_per_step * config.sequence_len,
            micro_batches=config.known_split[1],
            layers={name: each.profiles[each.layers[0]] for name, each in profiles.items()},
            update_seconds=model.spec.layers[0].trained_elements / hardware.host.adam_parameters_per_second,
            exact_losses=exact.losses,
            rounds=list(bench.rounds(end)),
        )


class _Bench:
    """The folder with the model and the tokens, and the trainings that read them."""

    def __init__(self, size: str, places: Sequence[Path], log: RunLog) -> None:
        """Write a model of random weights, and random tokens for all steps of a training."""
        self._folder, self._log = places[0], log
        shape, steps = SIZES[size]
        content = {
            "base_model": str(self._folder / "model"),
            "datasets": [{"path": str(self._folder / "tokens.jsonl"), "type": "tokens"}],
            "sample_packing": False,
            "shuffle": False,
            "learning_rate": 1e-4,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "max_grad_norm": 0,
            "dtype": "bfloat16" if gpu_names() else "float32",  # what `ratel init` chooses
            "head_chunk": "1GiB",  # all logits at once: the head's gradient is one product, as in plain PyTorch
            "storage": {"paths": [str(each / "store") for each in places]},
            "output_dir": str(self._folder / "output"),
            **steps,
        }
        self._file = self._folder / "run.yaml"
        self._file.write_text(json.dumps(content), encoding="utf-8")
        config = self.config = as_recorded(read_config(self._file, log))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            llama = AutoConfig.for_model("llama", **shape, max_position_embeddings=config.sequence_len)
            model = AutoModelForCausalLM.from_config(llama, dtype=torch.bfloat16)
            model.save_pretrained(self._folder / "model")
        draw = random.Random(0)
        with (self._folder / "tokens.jsonl").open("w", encoding="utf-8") as file:
            for _ in range((config.max_steps or 0) * config.sequences_per_step):
                ids = draw.choices(range(shape["vocab_size"]), k=config.sequence_len)
                file.write(json.dumps({"input_ids": ids}) + "\n")

    def rounds(self, end: float) -> Iterator[dict[str, BenchTraining | None]]:
        """At most three rounds, and at least one; the others end before `end`, by `perf_counter`."""
        for number in (1, 2, 3):
            start = time.perf_counter()
            yield {PLAIN: self.plain(), CHECKPOINTING: self.plain("checkpointing"), RATEL: self.ratel()}
            now = time.perf_counter()
            self._log.say(f"round {number} took {format_seconds(now - start)}")
            if now + (now - start) > end:
                break

    def plain(self, *how: str) -> BenchTraining | None:
        """Train in plain PyTorch. None if there is not enough memory."""
        printed = self._run("plain PyTorch", "ratel_cli.run.ask.plain_training", str(self._file), *how)
        return None if printed is None else BenchTraining(**json.loads(printed.splitlines()[-1]))

    def ratel(self) -> BenchTraining:
        """Train with `ratel finetune`, and remove what it leaves."""
        if self._run("ratel finetune", "ratel_cli", "finetune", str(self._file)) is None:
            raise _does_not_fit("ratel finetune")
        directory = self.config.output_dir / "run"
        steps = read_history(directory / METRICS_NAME).steps
        traffic = json.loads((directory / PLAN_NAME).read_text(encoding="utf-8"))["traffic"]
        for folder in (self.config.output_dir, *self.config.storage.paths):
            rmtree(folder)
        return BenchTraining(
            step_seconds=[each.step_seconds for each in steps],
            losses=[each.loss for each in steps],
            peak_bytes=steps[-1].host_peak_bytes,
            gpu_peak_bytes=steps[-1].gpu_peak_bytes,
            predicted_seconds=steps[0].predicted_seconds,
            planned_bytes=sum(each.planned_nvme_bytes for each in steps) + traffic["nvme_first_read_bytes"],
            moved_bytes=sum(sum(each.moved_bytes.values()) for each in steps),
        )

    def _run(self, what: str, module: str, *arguments: str) -> str | None:
        """What a process prints that runs the module; None if it does not get enough memory."""
        ended = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": str(self._folder / "cache")},
        )
        if ended.returncode == -signal.SIGKILL or "OutOfMemoryError" in ended.stderr:
            return None
        if ended.returncode != 0:
            raise EnvironmentFailure(
                f"{what} ended with exit code {ended.returncode}: "
                + (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            )
        return ended.stdout


def _does_not_fit(what: str) -> EnvironmentFailure:
    return EnvironmentFailure(f"{what} does not fit into memory here", "choose a smaller --size")
