"""A run that trains a part of the weights, by patterns over their names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import as_json, assert_rejected, ratel, works
from tests.e2e.trained import in_plain_torch

NUM_STEPS = 4
PATTERNS = ["model.layers.1.(self_attn|post)", "lm_head.weight$"]
PREFIXES = ("model.layers.1.self_attn", "model.layers.1.post_attention", "lm_head.weight")
CHANGES: dict[str, object] = {"unfrozen_parameters": PATTERNS, "max_steps": NUM_STEPS, "dtype": "bfloat16"}


def test_the_export_is_what_pytorch_trains(make_config: MakeConfig, base: Path) -> None:
    """What is frozen is in it as the base model's files have it."""
    config = make_config(**CHANGES)
    config.run_until_killed(kill_at="commit.written:4")
    config.succeed()
    before, found, wanted = (
        load_file(base / "model.safetensors"),
        config.exported,
        in_plain_torch(config, base, unfrozen=PREFIXES),
    )
    assert found.keys() == before.keys()
    for name, values in before.items():
        if name.startswith(PREFIXES):
            assert torch.equal(found[name], wanted.weights[name].to(found[name].dtype)), name
            assert not torch.equal(found[name], values.to(found[name].dtype)), name
        else:
            assert torch.equal(found[name], values) and found[name].dtype == values.dtype, name
    assert [line["loss"] for line in config.metrics] == list(wanted.losses)
    assert "bit for bit" in works("verify", config).stdout
    assert "unfrozen_parameters" in (config.output / "README.md").read_text()


@pytest.mark.full
def test_the_plan_is_what_a_step_moves(make_config: MakeConfig) -> None:
    """A step writes the state of what is trained, and backward reads nothing below it."""
    config, whole = make_config(**CHANGES), make_config("whole", max_steps=NUM_STEPS, dtype="bfloat16")
    config.succeed()
    plans = [as_json("plan", each) for each in (config, whole)]
    written = [sum(num for key, num in each["traffic"].items() if key.endswith("_written_bytes")) for each in plans]
    # What a step writes may be counted with the next one. To the byte it is compared in tests/engine.
    num_writes = NUM_STEPS + sum(line["clipped"] for line in config.metrics)  # speculation may write a step twice
    assert 0 < sum(line["nvme_written_bytes"] for line in config.metrics) <= num_writes * written[0]
    assert written[0] < written[1] / 2
    assert plans[0]["model"]["flops_backward"] < plans[1]["model"]["flops_backward"]


@pytest.mark.full
def test_ranks_have_a_part_each(make_config: MakeConfig) -> None:
    changes = {**CHANGES, "dtype": "float32"}
    config, alone = make_config("ranks", **changes), make_config("alone", **changes, gradient_accumulation_steps=4)
    config.succeed_ranks(2)
    alone.succeed()
    assert [line["loss"] for line in config.metrics] == pytest.approx([line["loss"] for line in alone.metrics])
    found = [each.exported for each in (config, alone)]
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name], rtol=1e-4, atol=1e-5)
        assert name.startswith(PREFIXES) or torch.equal(values, found[1][name])


@pytest.mark.full
def test_frozen_parameters_are_left_out(make_config: MakeConfig, base: Path) -> None:
    config = make_config(frozen_parameters=["model.embed", "model.layers.0"], max_steps=NUM_STEPS)
    config.succeed()
    before, found = load_file(base / "model.safetensors"), config.exported
    same = {name for name, values in before.items() if torch.equal(found[name], values)}
    assert same == {name for name in before if name.startswith(("model.embed", "model.layers.0."))}


@pytest.mark.full
def test_another_part_is_another_run(make_config: MakeConfig) -> None:
    config = make_config(**{**CHANGES, "max_steps": 2})
    config.succeed()
    ended = config.finetune("frozen_parameters=[lm_head]", "max_steps=4")
    assert_rejected(ended, 2, "which has other settings: frozen_parameters was [], is now ['lm_head']")
    ended = make_config("other", max_steps=4, dtype="bfloat16").finetune("--from", str(config.output))
    assert_rejected(ended, 2, "that run trains another model: unfrozen_parameters was")


@pytest.mark.parametrize(
    ("key", "pattern", "message"),
    [
        ("unfrozen_parameters", "model.layers.7", "unfrozen_parameters: model.layers.7: matches no parameter"),
        ("unfrozen_parameters", "lm_head.(", "unfrozen_parameters: lm_head.(: not a regular expression"),
        ("unfrozen_parameters", "model.embed_tokens.weight[:10]", "brackets at the end are rows"),
        ("frozen_parameters", ".*", "frozen_parameters: no parameter is left to train"),
    ],
)
def test_patterns_that_cannot_be(make_config: MakeConfig, key: str, pattern: str, message: str) -> None:
    for ended in (make_config(**{key: [pattern]}).finetune(), ratel("plan", make_config("plan", **{key: [pattern]}))):
        assert_rejected(ended, 2, message)


@pytest.mark.parametrize("key", ["embedding_lr", "embedding_lr_scale"])
def test_a_rate_for_ends_that_are_frozen(make_config: MakeConfig, key: str) -> None:
    frozen = make_config(**{**CHANGES, "unfrozen_parameters": ["model.layers.0"], key: 0.5})
    ended = frozen.finetune()
    assert_rejected(ended, 2, f"{key}: embedding and head are frozen")
    assert "hint: remove it, or train one of them" in ended.stderr
    head = make_config("head", **{**CHANGES, "unfrozen_parameters": ["lm_head"], key: 0.5, "max_steps": 1})
    head.succeed()
