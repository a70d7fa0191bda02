"""`ratel check` on any value of any key, and of any field of config.json: it passes, or names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from ratel_cli.config.keys.key_groups import OF_ADAPTER, OF_PREFERENCES, OF_QUANTISATION, OF_RATES
from ratel_cli.config.others.aliases import SECTIONS
from tests.e2e.runs import SETTINGS, ratel

VALUES = [
    *(0, 1, -1, 2, 3, 7, 64),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**25, int("9" * 299), -(10**25)),
    *(0.5, 1.0, 1.5, -0.5, 1e-9, 1e-300, 5e-324, 1e9, 1e25, 1e300, 1.7976931348623157e308, -0.0),
    *(float("inf"), float("-inf"), float("nan"), None, True, False),
    *("", "auto", "none", "a", " ", "~", "a" * 5000, "ä\U0001f600", "%s{0}"),
    *("1e-4", "24GiB", "9" * 299 + "GiB", "1e999", "1"),
    *("../x", "/dev/null", "/", "*[(", "train[99999999999999999999999:]", "train[:99%]"),
    *([], {}, [[]], ["a", "a"], [1], {"a": 1}),
]
OF_BASE = [
    *(0, 1, -1, -5, 3, 5, 2**31, 2**40, 2**63, 10**25, 0.5, -0.5, 1e300),
    *(None, True, False, "a", "", [], {}, [1], "float8", {"rope_type": "linear", "factor": 1e300}),
]
MORE_FIELDS = (
    "auto_map",
    "layer_types",
    "num_experts",
    "quantization_config",
    "rope_scaling",
    "sliding_window",
    "text_config",
)
NEEDS: Mapping[str, Mapping[str, object]] = {
    "model_shape": {
        "base_model": None,
        "datasets": None,
        "model_shape": {"num_layers": 2, "num_heads": 2, "hidden_size": 64},
    },
    "storage.snapshot": {"storage": {"snapshot": {"path": "snapshots", "every": 1}}},
    "optim_args": {"optimizer": "muon"},
    "optim_args.momentum": {"optimizer": "sgd"},
    "lr_scheduler_kwargs": {"lr_scheduler": "warmup_stable_decay"},
    "lr_scheduler_kwargs.power": {"lr_scheduler": "polynomial"},
    "lr_scheduler_kwargs.min_lr": {"lr_scheduler": "cosine_with_min_lr"},
    "lr_scheduler_kwargs.num_cycles": {"lr_scheduler": "cosine_with_restarts"},
    "lr_scheduler_kwargs.timescale": {"lr_scheduler": "inverse_sqrt"},
    "test_datasets": {"test_datasets": [{"path": "rows.jsonl", "type": "completion"}]},
}
"""By key or section: what must be there for it to mean something."""


def keys() -> Iterator[str]:
    """All of them, with their sections."""
    for section, model in SECTIONS.items():
        yield from (f"{section}.{key}".lstrip(".") for key in model.model_fields)


def config_for(key: str, value: object) -> dict[str, Any]:
    """A config with this value, in which the key may be."""
    config: dict[str, Any] = {"base_model": "base", "output_dir": "out", **SETTINGS}
    config["datasets"] = [{"path": "rows.jsonl", "type": "completion"}]
    if key in (*OF_ADAPTER, *OF_QUANTISATION, *OF_RATES):
        config["adapter"] = "lora"
    if key in OF_PREFERENCES:
        config |= {"rl": "kto" if key.startswith("kto") else "dpo", "datasets": [{"path": "pairs.jsonl"}]}
    for needed, others in NEEDS.items():
        if key == needed or key.startswith(f"{needed}."):
            config |= others
    inner: Any = config
    *sections, name = key.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
        inner = inner[0] if isinstance(inner, list) else inner
    inner[name] = value
    return {each: found for each, found in config.items() if found is not None or each == key}


@pytest.fixture
def here(base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a base model and rows; layers are not timed."""
    shutil.copytree(base, tmp_path / "base")
    shutil.copy(rows, tmp_path / "rows.jsonl")
    pairs = ({"prompt": f"q {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(24))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ratel_cli.run.train.finetune.tried_profile", lambda *_, **__: None)
    return tmp_path


def passes_or_says_why(config: Mapping[str, object]) -> str:
    """What is wrong with the answer; empty if nothing is."""
    Path("run.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    ended = ratel("check", "run.yaml")
    is_answer = ended.code in (0, 2, 3) and "Traceback" not in ended.stderr and "a bug in Ratel" not in ended.stderr
    return "" if is_answer else f"exit {ended.code}: {ended.stderr[-500:]}"


def failures(configs: Mapping[str, Mapping[str, object]]) -> list[str]:
    return [f"{shown[:60]}: {why}" for shown, config in configs.items() if (why := passes_or_says_why(config))]


@pytest.mark.nightly
@pytest.mark.parametrize("key", sorted(keys()))
@pytest.mark.usefixtures("here")
def test_any_value_of_a_key(key: str) -> None:
    assert failures({repr(value): config_for(key, value) for value in VALUES}) == []


@pytest.mark.nightly
@pytest.mark.parametrize("field", sorted({*LlamaConfig().to_dict(), *MORE_FIELDS}))
def test_any_value_of_a_field_of_a_base(here: Path, field: str) -> None:
    path = here / "base" / "config.json"
    content = json.loads(path.read_text())
    failed = {}
    for value in OF_BASE:
        path.write_text(json.dumps({**content, field: value}))
        failed[repr(value)] = passes_or_says_why(config_for("seed", 1))
    assert {shown: why for shown, why in failed.items() if why} == {}
