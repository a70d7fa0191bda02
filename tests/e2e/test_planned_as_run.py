"""A plan before a run, the run's own plans and a plan after it differ only by measured times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.run.inputs.model_description import describe_model
from tests.e2e.runs import Config, works, write_config
from tests.tiers import sample

LLAMA_LIKE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
MODELS: dict[str, dict[str, object]] = {
    "llama": LLAMA_LIKE,
    "glm": LLAMA_LIKE,
    "gemma2": {**LLAMA_LIKE, "num_hidden_layers": 2},
    "mixtral": {**LLAMA_LIKE, "num_local_experts": 4, "num_hidden_layers": 2},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
}


def config_file(directory: Path, model_type: str, *, base: Path, rows: Path) -> Config:
    """The config of a run with random weights: its model is only a config.json and a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    own = directory / "own"
    tokenizer.save_pretrained(own)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **MODELS[model_type], **ids).save_pretrained(own)
    return write_config(
        directory, base=own, rows=rows, random_init=True, activations="recompute", max_steps=2, dtype="bfloat16"
    )


def plan(config: Config, hardware: Path) -> dict[str, Any]:
    ended = works("plan", config, "--hardware", hardware, "--json")
    content: dict[str, Any] = json.loads(ended.stdout)
    return content


@pytest.mark.full
@pytest.mark.parametrize("model_type", sample(MODELS, every=3))
def test_plans_differ_only_by_what_is_measured(model_type: str, tmp_path: Path, base: Path, rows: Path) -> None:
    """With everything recomputed, because only a recorded step knows which outputs can be swapped."""
    config = config_file(tmp_path, model_type, base=base, rows=rows)
    config.succeed()
    run = config.output / "run"
    model = json.loads((run / "model.json").read_text())
    of_run = json.loads((run / "plan.json").read_text())
    recorded = plan(config, run / "hardware.json")
    (run / "model.json").unlink()
    estimated = plan(config, run / "hardware.json")
    assert [each["activations"]["source"] for each in (of_run, recorded, estimated)] == [*2 * ["recorded"], "analytic"]
    spec = describe_model(load_config(config).config, name="", log=RunLog()).spec
    assert json.loads(json.dumps(spec.to_json())) == {key: model[key] for key in spec.to_json()}
    for each in (of_run, recorded):
        assert bytes_of(each) == bytes_of(estimated)


def bytes_of(plan: dict[str, Any]) -> dict[str, object]:
    """The parts of a plan that do not depend on times."""
    activations, traffic = plan["activations"], plan["traffic"]
    return {
        "num_parameters": plan["model"]["num_parameters"],
        "num_blocks": plan["model"]["num_blocks"],
        "inputs": activations["inter_block_bytes"],
        "swapped": (activations["swapped_bytes"], activations["swapped_to_nvme_bytes"]),
        "traffic": (traffic["nvme_read_bytes"], traffic["nvme_written_bytes"]),
        "store": plan["memory"]["nvme_bytes"],
        "written": plan["wear"]["tb_written_per_step"],
    }
