"""A run whose rows have one sample each is predicted from the lengths of its data, and planned for the widest."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import family_configs
from tests.e2e.conftest import MakeConfig
from tests.e2e.encoders import CLASSES, save_encoder, save_pair_model, write_encoder_rows, write_pair_rows
from tests.e2e.preferences import pairs, verdicts, write
from tests.e2e.runs import as_json, ratel, works, write_rows
from tests.tiers import sample, thinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of run whose rows are not packed."""

    write: Callable[[Path], Path]
    keys: dict[str, object]
    save: Callable[[Path], Path] | None = None
    """None: the base model of other tests."""


def _save_hybrid(directory: Path) -> Path:
    """A model that computes rows in chunks, and cannot keep packed samples apart."""
    tokenizer = AutoTokenizer.from_pretrained(directory.parent / "base")
    config = family_configs.tiny_config(
        "xlstm", mode="train", chunk_size=8, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _of_type(name: str, **keys: object) -> dict[str, object]:
    return {"data_type": name, **keys}


KINDS = {
    "text": Kind(write=write_rows, keys={"sample_packing": False}),
    "pairs": Kind(write=lambda path: write(path, pairs()), keys=_of_type("auto", rl="dpo")),
    "verdicts": Kind(write=lambda path: write(path, verdicts()), keys=_of_type("auto", rl="kto")),
    "classes": Kind(
        write=write_encoder_rows, keys={"labels": list(CLASSES), "data_type": "classification"}, save=save_encoder
    ),
    "seq2seq": Kind(
        write=write_pair_rows,
        keys={"field_prompt": "question", "field_completion": "answer", "data_type": "seq2seq"},
        save=save_pair_model,
    ),
    "hybrid": Kind(write=write_rows, keys={}, save=_save_hybrid),
}


@pytest.mark.parametrize("name", thinned(sample(KINDS, every=3, offset=1), every=2))
def test_the_tokens_of_a_step_are_those_of_the_data(
    name: str, make_config: MakeConfig, base: Path, tmp_path: Path
) -> None:
    """What is predicted for a step has as many tokens as the steps of an epoch have in the run's own metrics, and the
    rate is that of these tokens; the memory is that of full rows. `ratel plan` knows it, once the data was read."""
    kind = KINDS[name]
    rows = kind.write(tmp_path / "rows.jsonl")
    if kind.save is _save_hybrid:
        (tmp_path / "base").symlink_to(base)
    model = base if kind.save is None else kind.save(tmp_path / name)
    keys = dict(kind.keys)
    source: dict[str, object] = {"path": str(rows), "type": keys.pop("data_type", "completion")}
    source |= {key: keys.pop(key) for key in ("labels", "field_prompt", "field_completion") if key in keys}
    config = make_config(base=model, datasets=[source], max_steps=None, num_epochs=1, **keys)
    of_full_rows = as_json("plan", config)
    stderr = config.succeed()
    steps = config.metrics
    tokens = mean(step["tokens"] for step in steps)
    plan = json.loads((config.output / "run" / "plan.json").read_bytes())
    workload = plan["workload"]
    full_tokens = workload["micro_batch_size"] * workload["num_micro_batches"] * workload["sequence_len"]
    assert workload["filling"]["tokens"] * full_tokens == pytest.approx(tokens)
    assert workload["filling"]["tokens"] <= workload["filling"]["computed"] < 0.9
    rate = plan["throughput"]["tokens_per_second"]
    assert rate * plan["time"]["step_seconds"] == pytest.approx(tokens)
    assert f"{tokens:.0f} on average in this data" in stderr
    planned = as_json("plan", config)
    assert planned["throughput"]["tokens_per_second"] * planned["time"]["step_seconds"] == pytest.approx(tokens)
    assert of_full_rows["workload"]["filling"] is None and of_full_rows["memory"]["fits"]
    assert of_full_rows["throughput"]["tokens_per_second"] * of_full_rows["time"]["step_seconds"] == pytest.approx(
        full_tokens
    )


@pytest.mark.full
def test_a_plan_says_that_it_assumes_full_rows(make_config: MakeConfig) -> None:
    """As long as nothing has read the data as it is now; `ratel check` does."""
    config = make_config(sample_packing=False)
    assert ", assuming full rows" in ratel("plan", config).stdout
    works("check", config)
    known = ratel("plan", config).stdout
    assert "on average in this data" in known and "assuming" not in known
    assert "assuming full rows" in ratel("plan", config, "sequence_len=32").stdout
    assert "assuming full rows" not in ratel("plan", config, "sample_packing=true").stdout
