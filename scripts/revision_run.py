"""Trains as a config says, and writes the hash of every value that the run's store has then.

    python -P scripts/revision_run.py found.json run.yaml NUM_RANKS
    python -P scripts/revision_run.py found.json loop.py STORE

Of several ranks, none of whose stores has everything, no values are read. The second form trains a hooked module by its
own loop, as tests/golden/loop.py has one, in a new store.

`scripts/compare_revisions.py` runs this file with the interpreter of an older or newer revision of Ratel, whose own
code trains and reads the store, since formats differ between revisions. So it imports nothing of the repository but
that revision's package, and only what revisions have in common but for a module's place and a field's size.

Invariant: values are named by parameter and field, so that neither their order nor their place in the store matters.
The exit code is that of `ratel finetune`; the file is written after success alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from importlib import import_module
from pathlib import Path

import torch

import ratel_cli
from ratel_cli import _native
from ratel_cli.cli.app import main as ratel
from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog


def main(found: Path, trained: Path, argument: str) -> int:
    """Train, and write which code did so, and the hashes."""
    if trained.suffix == ".py":
        code, result = 0, trained_by_loop(trained, Path(argument))
    else:
        code = ratel(["finetune", str(trained), *(["--ranks", argument] if argument != "1" else [])])
        result = {"fields": stored_values(trained)} if code == 0 and argument == "1" else {}
    if code == 0:
        origins = [str(ratel_cli.__file__), str(_native.__file__)]
        found.write_text(json.dumps({"origins": origins, **result}), encoding="utf-8")
    return code


def trained_by_loop(path: Path, store: Path) -> dict[str, dict[str, str]]:
    """The losses of a hooked module's steps, and the SHA-256 of each tensor of its state."""
    spec = importlib.util.spec_from_file_location("loop", path)
    assert spec is not None and spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loop  # dataclasses look their module up
    spec.loader.exec_module(loop)
    module, hashes = loop.built(), {}
    with ratel_cli.hook(module, storage=[store]) as hooked:
        losses = loop.train(module, hooked)
        for name, tensors in hooked.state():
            for field, tensor in tensors.items():
                values = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                hashes[f"{name} {field}"] = hashlib.sha256(values).hexdigest()
    return {"steps": {f"step {step}": repr(loss) for step, loss in enumerate(losses, 1)}, "fields": hashes}


def stored_values(config: Path) -> dict[str, str]:
    """The SHA-256 of each field of each parameter, and of its fp32 master weights, in the last generation."""
    from ratel_cli.model.files.stored_weights import StoredWeights
    from ratel_cli.run.context import open_context

    package = Path(ratel_cli.__file__).parent  # the module has been moved
    has_wings = (package / "run" / "train" / "open.py").is_file()
    open_run = import_module("ratel_cli.run.train.open" if has_wings else "ratel_cli.run.open").open_run
    hashes = {}
    with open_context(load_config(config).config, RunLog()) as context:
        run = open_run(context)
        generation = run.store.current()
        for block in (each for each in run.base.model.spec.blocks if each.parameters):
            for field, num_bytes in _field_bytes(generation, block.index, block.num_elements).items():
                with context.pool.lease(num_bytes, field, crosses_link=False) as lease:
                    memory = lease.memory[:num_bytes]
                    generation.read(block.index, field, 0, block.num_elements, memory).wait()
                    size = num_bytes // block.num_elements
                    for each in block.parameters:
                        values = memory[each.start * size : each.stop * size]
                        hashes[f"{each.name} {field}"] = hashlib.sha256(values).hexdigest()
        with StoredWeights(run.base.model.spec, generation, context.pool, "float32") as weights:
            for block in run.base.model.spec.blocks:
                for each in block.parameters:
                    master = weights.whole(each.name).numpy().tobytes()
                    hashes[f"{each.name} master"] = hashlib.sha256(master).hexdigest()
    return hashes


def _field_bytes(generation: object, block: int, num_elements: int) -> dict[str, int]:
    """By name: the size of each field that the store has of a block."""
    blocks = getattr(generation, "blocks", None)
    if blocks is not None:
        return {field.name: field.num_bytes(num_elements) for field in blocks[block].record.fields}
    layout = getattr(generation, "layout")  # noqa: B009  once the same for all blocks; unknown to today's types
    return {field.name: field.bytes_per_element * num_elements for field in layout.fields}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
