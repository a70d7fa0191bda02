"""What `ratel plan` knows of a base model: the very blocks that a run builds, from the skeleton once, then cached."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

import ratel_cli.run.inputs.base_kinds
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.load import load_config
from ratel_cli.console import RunLog
from ratel_cli.engine.steps.footprint import measured_traits
from ratel_cli.errors import BadInput
from ratel_cli.run.files import user_cache
from ratel_cli.run.inputs.build_language import build_language_base, read_language_base
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.model_description import ModelDescription, describe_model, description_file
from ratel_cli.sizes import Task
from tests.engine.architectures import ARCHITECTURES, tiny_config
from tests.tiers import thinned

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GLM: dict[str, object] = {**LLAMA, "model_type": "glm", "head_dim": 8, "pad_token_id": 0, "eos_token_id": 2}
LLAMA_405B: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}
MIXTRAL_8X7B: dict[str, object] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3_30B_A3B: dict[str, object] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
}
GPT2_XL: dict[str, object] = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 1600,
    "n_layer": 48,
    "n_head": 25,
    "n_positions": 1024,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a cache of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(values: object, **settings: object) -> RunConfig:
    """A run's config for a base model of which there is nothing but this config.json."""
    directory = Path("base")
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    path = Path("run.yaml")
    lines = {"base_model": "base", "datasets": "none.jsonl", **settings}
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
    return load_config(path).config


def described(config: RunConfig) -> ModelDescription:
    return describe_model(config, name="unused", log=RunLog())


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """The configs whose skeletons were built."""
    found: list[RunConfig] = []

    def counting(config: RunConfig, task: Task | None = None) -> LanguageBase:
        found.append(config)
        return build_language_base(config, task)

    monkeypatch.setattr(ratel_cli.run.inputs.base_kinds, "build_language_base", counting)
    return found


@pytest.mark.parametrize("architecture", thinned(ARCHITECTURES, every=4))
def test_the_first_and_the_cached_description_are_the_skeletons(architecture: str, built: list[RunConfig]) -> None:
    config = config_of(tiny_config(architecture).to_dict())
    first, cached = described(config), described(config)
    assert len(built) == 1
    model = read_language_base(config, RunLog()).model
    assert first == cached == ModelDescription(spec=model.spec, traits=measured_traits(model))
    assert first.spec.name == "base"


@pytest.mark.parametrize("values", [GLM, {**GLM, "model_type": "helium"}], ids=["glm", "helium"])
def test_families_that_no_list_names_are_exact(values: dict[str, object]) -> None:
    config = config_of(values)
    model = read_language_base(config, RunLog()).model
    assert described(config) == ModelDescription(spec=model.spec, traits=measured_traits(model))
    assert model.spec.architecture.lower().startswith(str(values["model_type"]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "num_parameters"),
    [
        (LLAMA_405B, 405_853_388_800),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
        (GPT2_XL, 1_557_611_200),
    ],
    ids=["llama-405b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt2-xl"],
)
def test_sizes_of_published_models(values: dict[str, object], num_parameters: int) -> None:
    config = config_of(values)
    assert described(config).spec.num_parameters == num_parameters
    assert described(config).spec.num_parameters == num_parameters, "from the cache"


def test_keys_that_are_left_out_are_those_of_transformers() -> None:
    config = config_of({"model_type": "mistral", "vocab_size": 97, "num_hidden_layers": 1})
    wanted = AutoConfig.for_model("mistral")
    assert described(config).spec.hidden_size == wanted.hidden_size
    assert described(config).traits.num_heads == wanted.num_attention_heads


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "settings"),
    [({**LLAMA, "hidden_size": 64}, {}), (LLAMA, {"dtype": "float16"}), (LLAMA, {"attn_implementation": "eager"})],
    ids=["config.json", "dtype", "attention"],
)
def test_a_change_is_described_anew(
    values: dict[str, object], settings: dict[str, object], built: list[RunConfig]
) -> None:
    described(config_of(LLAMA))
    config = config_of(values, **settings)
    assert described(config).spec.hidden_size == values["hidden_size"]
    assert len(built) == 2


@pytest.mark.full
def test_other_software_describes_anew(built: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(LLAMA)
    described(config)
    monkeypatch.setattr(user_cache, "version_of", lambda package: f"{package} of tomorrow")
    described(config)
    assert len(built) == 2


def test_one_model_in_two_directories_is_described_once(built: list[RunConfig]) -> None:
    config = config_of(LLAMA)
    described(config)
    shutil.copytree("base", "copy")
    copy = described(config.model_copy(update={"base_model": "copy"}))
    assert len(built) == 1
    assert copy.spec.name == "copy"


@pytest.mark.parametrize(
    "damage",
    thinned(
        [
            lambda text: text[: len(text) // 2],
            lambda text: "",
            lambda text: "[]",
            lambda text: "[" * 100_000,
            lambda text: text.replace('"format_version": 7', '"format_version": 8'),
            lambda text: text.replace('"format_version": 7', '"format_version": "7"'),
            lambda text: text.replace('"num_heads": 4', '"num_heads": null'),
            lambda text: text.replace('"start": 0', '"start": 1'),
            lambda text: text.replace('"is_looked_up": ', '"is_found": '),
        ],
        every=3,
    ),
    ids=["cut", "empty", "a list", "nested", "other version", "text", "heads", "layout", "key"],
)
def test_a_damaged_file_is_replaced_without_a_word(
    damage: object, built: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(LLAMA)
    first, file = described(config), description_file(config)
    healthy = file.read_text()
    assert callable(damage)
    file.write_text(damage(healthy))
    assert file.read_text() != healthy
    assert described(config) == first
    assert file.read_text() == healthy
    assert len(built) == 2
    assert capsys.readouterr().err == ""
    assert list(file.parent.iterdir()) == [file], "no unfinished file stays"


def test_a_cache_that_cannot_be_written_is_reported_and_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    Path(os.environ["XDG_CACHE_HOME"]).write_text("a file where the directory should be")
    config = config_of(LLAMA)
    assert described(config).spec.num_layers == 3
    assert "the model's description cannot be cached (Not a directory)" in capsys.readouterr().err


def test_nothing_of_a_cached_model_is_built(built: list[RunConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(LLAMA)
    first = described(config)
    monkeypatch.setitem(sys.modules, "ratel_cli.run.inputs.base_model", None)
    assert described(config) == first


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "must contain an object"),
        ({}, "`model_type` is missing or is not text"),
        ({**LLAMA, "model_type": 7}, "`model_type` is missing or is not text"),
        ({**LLAMA, "model_type": "nosuch"}, "not a model configuration that transformers knows"),
        (
            {"model_type": "t5"},
            r"T5ForConditionalGeneration \(t5\) is an encoder-decoder; it does not learn to predict the next token",
        ),
        ({**LLAMA, "hidden_size": "32"}, r"field 'hidden_size': \w+: Field 'hidden_size' expected int, got str"),
        ({**LLAMA, "hidden_size": 33}, r"The hidden size \(33\) is not a multiple"),
        ({**LLAMA, "hidden_size": 0}, r"config\.json"),
        ({**LLAMA, "hidden_size": -1}, r"config\.json"),
        ({**LLAMA, "num_hidden_layers": 1 << 70}, "layers are more than the limit of 10000"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_hidden_layers is 0; it must be at least 1"),
        ({**LLAMA, "num_attention_heads": 6}, "key-value heads|config.json"),
        ({**LLAMA, "num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
        ({**LLAMA, "output_router_logits": True}, "sets output_router_logits: true"),
        ({**LLAMA, "attention_dropout": 2}, "it must be a probability between 0 and 1"),
    ],
)
def test_a_config_that_no_run_accepts_is_rejected(values: object, message: str) -> None:
    """With the words of the run, and each time anew: an error is not cached."""
    config = config_of(values)
    for _ in range(2):
        with pytest.raises(BadInput, match=message):
            described(config)


def test_code_that_comes_with_a_model_is_not_run(here: Path) -> None:
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config = config_of({**LLAMA, "model_type": "own", "auto_map": own})
    (here / "base" / "modeling_own.py").write_text(f"open({str(here / 'canary')!r}, 'w').close()\n")
    with pytest.raises(BadInput, match="not a model configuration that transformers knows"):
        described(config)
    assert not (here / "canary").exists()


def test_a_fifo_is_not_waited_for(here: Path) -> None:
    config = config_of(LLAMA)
    (here / "base" / "config.json").unlink()
    os.mkfifo(here / "base" / "config.json")
    with pytest.raises(BadInput, match=r"config\.json: not a regular file"):
        described(config)
