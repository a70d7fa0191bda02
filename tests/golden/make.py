"""Makes the runs of `tests/golden/data` with the code that is installed: each is killed after its third step.

    python -m tests.golden.make DIRECTORY [NAME ...]

Later versions must read what is there, so it is made once, by the version whose files it stands for, and never again by
another. A run is an archive with all that a user has: the base model, the data, the config, the output directory, the
store with its last generation and a saved one, snapshots, and the cache of tokens; that of a hooked module has only its
store. Beside these lies what a reader must
find: hashes of the tensors that are exported, and the state from which plain PyTorch goes on (`state.safetensors`: fp32
weights and moments by parameter).

Invariant: paths in a config are relative to its directory, so that the archive may lie anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import ratel_cli
from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.model.files.stored_weights import StoredWeights
from ratel_cli.run.context import open_context
from ratel_cli.run.train.open import open_run
from ratel_cli.store.store import Progress
from tests.e2e.encoders import save_pair_model, write_pair_rows
from tests.e2e.latents import save_denoiser, write_latents
from tests.e2e.preferences import pairs, write
from tests.e2e.runs import Config, ratel, save_base, wait, write_config, write_rows
from tests.golden.loop import built

NUM_APPLIED, SAVED = 3, 2
"""Steps that were committed with an update: in float16 the first ones overflow. And a step that is saved."""
STATE, EXPECTED = "state.safetensors", "expected.json"
LOOP, LOOP_STORE = "a loop", "state"
"""The run of a hooked module, and its store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """A run that is made."""

    keys: Mapping[str, object]
    """Of its config."""
    hidden_size: int = 16
    num_ranks: int = 1
    kind: str = "text"


_LORA: Mapping[str, object] = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.1}
RUNS: Mapping[str, Golden] = {
    "full fp32": Golden(
        keys={"dtype": "float32", "storage": {"engine": "threads", "snapshot": {"path": "snapshot", "every": 1}}}
    ),
    "full bf16": Golden(keys={"dtype": "bfloat16"}),
    "fp16": Golden(keys={"dtype": "float16"}),
    "adapter": Golden(keys={"dtype": "bfloat16", **_LORA}),
    "nf4 adapter": Golden(
        keys={"dtype": "bfloat16", **_LORA, "adapter": "qlora", "load_in_4bit": True}, hidden_size=32
    ),
    "8 bit moments": Golden(keys={"dtype": "bfloat16", "optimizer": "adamw_8bit"}, hidden_size=32),
    "muon": Golden(keys={"dtype": "float32", "optimizer": "muon"}),
    "dpo": Golden(keys={"dtype": "float32", "rl": "dpo", "micro_batch_size": 2}, kind="pairs"),
    "two ranks": Golden(keys={"dtype": "bfloat16", "micro_batch_size": 1}, num_ranks=2),
    "latents": Golden(
        keys={"dtype": "float32", "sequence_len": None, "sample_packing": None, "micro_batch_size": 3}, kind="latents"
    ),
}
"""By name."""
COMMON_KEYS: Mapping[str, object] = {
    "max_steps": 6,
    "gradient_accumulation_steps": 2,
    "lr_scheduler": "constant",
    "warmup_ratio": 0.0,
    "save_steps": SAVED,
    "save_total_limit": 2,
    "shuffle": False,
}
"""Of each config."""


def main(directory: Path, names: list[str]) -> None:
    """Make the archives, each in a process of its own whose working directory is that of the run."""
    for name in names or (*RUNS, LOOP):
        with tempfile.TemporaryDirectory(prefix="ratel-golden-") as place:
            path = {**os.environ, "PYTHONPATH": str(Path.cwd()), "XDG_CACHE_HOME": str(Path(place, "cache"))}
            subprocess.run([sys.executable, "-m", "tests.golden.make", "--here", name], cwd=place, env=path, check=True)
            with tarfile.open(directory / f"{name.replace(' ', '-')}.tar.xz", "w:xz", preset=9) as archive:
                archive.add(place, ".")


def make_loop_here() -> None:
    """Make the run of a hooked module in the working directory."""
    command = [sys.executable, "-m", "tests.golden.loop", LOOP_STORE, str(NUM_APPLIED + 1)]
    assert subprocess.run(command, check=False).returncode == 9
    state = {}
    with tempfile.TemporaryDirectory() as place:
        net = built()
        with ratel_cli.hook(net, storage=[shutil.copytree(LOOP_STORE, Path(place, "copy"))]) as hooked:
            assert hooked.num_steps == NUM_APPLIED
            for name, tensors in hooked.state():
                names = {"weight": "weight", "exp_avg": "m32", "exp_avg_sq": "v32"}
                state |= {f"{name} {names[key]}": each for key, each in tensors.items() if key in names}
    save_file(state, STATE)


def make_here(name: str) -> None:
    """Make the run in the working directory."""
    golden = RUNS[name]
    config = write_run(golden, Path())
    point = f"commit.written:{NUM_APPLIED + 2}"  # the first commit is that of the import
    if golden.num_ranks == 1:
        config.run_until_killed(kill_at=point)
    else:
        points = dict.fromkeys(range(golden.num_ranks), point)
        assert [wait(each) for each in config.start_ranks(golden.num_ranks, kill_at=points)] == [-9] * golden.num_ranks
    state, progress = state_of(config)
    hashes = {}
    for step in (None, SAVED):
        with tempfile.TemporaryDirectory() as exported:
            chosen = [] if step is None else ["--step", str(step)]
            ended = ratel("export", "run.yaml", "-o", f"{exported}/model", *chosen)
            assert ended.code == 0, ended.stderr
            hashes[str(step or progress.step)] = hashes_of(Path(exported, "model"))
    counted = {"step": progress.step, "num_updates": progress.updates, "loss_scale": progress.loss_scale}
    Path(EXPECTED).write_text(json.dumps({"exports": hashes, **counted}, indent=1), encoding="utf-8")
    save_file(state, STATE)


def write_run(golden: Golden, directory: Path) -> Config:
    """Write base, rows and config of a run in `directory`, and return the config's path."""
    keys = {**COMMON_KEYS, **golden.keys}
    base, rows, data_type = directory / "base", directory / "rows.jsonl", "completion"
    if golden.kind == "latents":
        save_denoiser(base, head_dim=4)
        rows, data_type = write_latents(directory / "latents.safetensors"), "latents"
    elif golden.kind == "texts":
        save_pair_model(base)
        columns = {"field_prompt": "question", "field_completion": "answer"}
        keys["datasets"] = [{"path": str(write_pair_rows(rows)), "type": "seq2seq", **columns}]
    else:
        save_base(base, hidden_size=golden.hidden_size)
        if golden.kind == "pairs":
            write(rows, pairs(24))
            data_type = "auto"
        else:
            write_rows(rows)
    return write_config(directory, base=base, rows=rows, data_type=data_type, **keys)


def hashes_of(directory: Path) -> dict[str, str]:
    """By name: dtype, shape and SHA-256 of each tensor of an exported model."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values = tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.view(1).view(torch.uint8)
            digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
            found[name] = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {digest}"
    return found


def state_of(config: Path) -> tuple[dict[str, torch.Tensor], Progress]:
    """The fp32 weights of each parameter that is trained, and its moments as the store has them; and the progress."""
    state = dict[str, torch.Tensor]()
    with open_context(load_config(config).config, RunLog()) as context:
        run = open_run(context)
        generation, spec = run.generation(None), run.base.model.spec
        with StoredWeights(spec, generation, context.pool, "float32") as weights:
            for block in spec.blocks:
                moments = [each for each in block.record.fields if each.name[0] in "mv"]
                for each in block.parameters if moments else ():
                    state[f"{each.name} weight"] = weights.whole(each.name).clone()
                for found in moments:
                    with context.pool.lease(found.num_bytes(block.num_elements), "", crosses_link=False) as lease:
                        generation.read(block.index, found.name, 0, block.num_elements, lease.memory).wait()
                        values = torch.frombuffer(bytearray(lease.memory), dtype=getattr(torch, found.dtype))
                    for each in block.parameters:
                        start = each.start // found.per
                        stop = start + found.num_values(each.stop - each.start)
                        state[f"{each.name} {found.name}"] = values[start:stop].clone()
        return state, run.store.progress


if __name__ == "__main__":
    if sys.argv[1] == "--here":
        make_loop_here() if sys.argv[2] == LOOP else make_here(sys.argv[2])
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
