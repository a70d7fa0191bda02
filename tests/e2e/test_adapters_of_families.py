"""Adapters of families of transformers that are drawn by the release: PEFT's bits, and a model that stays as it is.

The table of families (docs/families.md) has the models. The full tier tries twelve of them, among them two mixtures of
experts and a model with a vision tower, with settings in which any two values meet; the nightly tier tries all. A case
has its seed and its settings in its name.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ratel_cli.io.queue import open_queue
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.store import Store
from scripts.families import TABLE, Refused, finetune, recipe_of, save_base, train_plain, training_rows
from tests.e2e.runs import DTYPES, Config, file_hash, ratel, works
from tests.e2e.trained import saved_name
from tests.reference import Recipe, Trained
from tests.tiers import pairwise, sample

SEED = version("ratel-cli")
NUM_STEPS = 3
_ROW = re.compile(r"\| (?P<family>\S+) \|[^|]*\| equal \| (?P<bfloat16>[^|]*) \|")
RESULTS = {found["family"]: found["bfloat16"] for found in map(_ROW.match, TABLE.read_text().splitlines()) if found}
"""The families that plain PyTorch and Ratel train, and whether they do so in bf16."""
REFUSED = {
    **dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "incompatible with Mamba"),
    **dict.fromkeys(("llama4", "llama4_text", "phimoe"), "is no linear layer, though it is made as one"),
    "deepseek_v4": "DeepseekV4GroupedLinear is no linear layer",
}
"""Families of which not all linear layers can have an adapter, and why: PEFT refuses a projection that Mamba's kernels
read by themselves; a router returns three tensors, and a layer of groups takes its input apart."""
EXPERTS = (
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "minimax",
    "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
"""Mixtures of experts whose experts PEFT takes for linear layers. Their adapters have no dropout and no magnitudes."""
WITH_VISION = ("fuyu", "gemma3", "git", "got_ocr2", "phi4_multimodal")
ADAPTABLE = [family for family in RESULTS if family not in REFUSED]
OTHERS = [family for family in ADAPTABLE if family not in (*EXPERTS, *WITH_VISION)]
KINDS: dict[str, dict[str, object]] = {
    "lora": {"lora_dropout": 0.1},
    "rslora": {"lora_dropout": 0.2, "peft_use_rslora": True},
    "dora": {"lora_dropout": 0.1, "peft_use_dora": True},
    "a module whole": {"lora_dropout": 0.1},
    "lora+": {"lora_dropout": 0.1, "loraplus_lr_ratio": 16.0},
}
LOST_BY_PEFT = {"laguna": "model.layers.1.mlp.shared_experts.gate_proj.lora_A.default.weight"}
"""What PEFT (0.21) does not find in an adapter that it has saved itself: transformers' renaming of `shared_expert.`,
meant for checkpoints, also meets `shared_experts`."""
SETTINGS = [
    case.values for case in pairwise(list(KINDS), ["bfloat16", "float32"], [1, 3], [None, 0.05]) if not case.marks
]
"""Settings in which any two values meet: the kind, the dtype, micro-batches, and the limit of the norm."""


def cases() -> list[ParameterSet]:
    """Those of all tiers. One is in the short tier: the model with a vision tower."""
    draw = random.Random(SEED)
    chosen = [*draw.sample(EXPERTS, 2), draw.choice(WITH_VISION), *draw.sample(OTHERS, max(12, len(SETTINGS)) - 3)]
    rest = [family for family in ADAPTABLE if family not in chosen]
    settings = draw.sample(SETTINGS, len(SETTINGS))
    found = []
    for place, family in enumerate((*chosen, *rest)):
        takes = [each for each in settings if _may_have(family, each)]
        values = takes[place % len(takes)] if family in rest else takes[0]
        if family in chosen:
            settings.remove(values)
            settings = settings or draw.sample(SETTINGS, len(SETTINGS))
        marks = pytest.mark.nightly if family in rest else () if place == 2 else pytest.mark.full
        name = f"seed {SEED}-{family}-{'-'.join(map(str, values))}"
        found.append(pytest.param(family, *values, marks=marks, id=name))
    return found


def _may_have(family: str, settings: Sequence[object]) -> bool:
    kind, dtype, *_ = settings
    return not (family in EXPERTS and kind == "dora") and not (dtype == "bfloat16" and RESULTS[family] != "equal")


def adapter_keys(model: PreTrainedModel, family: str, kind: str) -> dict[str, object]:
    """The keys of the config."""
    keys = {"adapter": "lora", "lora_r": 2, "lora_alpha": 3, **KINDS[kind]}
    if family in EXPERTS:
        keys["lora_dropout"] = 0.0
    if kind == "a module whole":
        keys["lora_modules_to_save"] = [_norm_of(model)]
    return keys


def _norm_of(model: PreTrainedModel) -> str:
    """The name of a module of the second layer that has a vector and no adapter."""
    layers = max(
        (each for each in model.get_decoder().named_modules() if isinstance(each[1], nn.ModuleList)),
        key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()),
    )
    [inside] = [name for name, module in model.named_modules() if module is layers[1]]
    return next(
        f"{inside}.1.{name}"
        for name, module in layers[1][1].named_modules()
        if [each.dim() for each in module.parameters()] in ([1], [1, 1])
    )


def in_peft(keys: Mapping[str, object], excluded: str | None) -> dict[str, object]:
    """The same in PEFT's words."""
    return {
        "r": keys["lora_r"],
        "lora_alpha": keys["lora_alpha"],
        "lora_dropout": keys["lora_dropout"],
        "target_modules": "all-linear",
        "exclude_modules": excluded,
        "use_rslora": bool(keys.get("peft_use_rslora")),
        "use_dora": bool(keys.get("peft_use_dora")),
        "modules_to_save": keys.get("lora_modules_to_save"),
        "task_type": "CAUSAL_LM",
    }


def finetuned(
    base: Path, directory: Path, recipe: Recipe, num_micro_batches: int, keys: dict[str, object]
) -> dict[str, object]:
    """Run it, without dropout where a layer is outside the stack of layers: that must be refused. Returns its keys."""
    changes = {"gradient_accumulation_steps": num_micro_batches, **keys}
    try:
        finetune(base, directory, recipe, training_rows(), **changes)
    except Refused as refused:
        assert "is outside the layers, where nothing can be dropped" in str(refused), refused
        keys = {**keys, "lora_dropout": 0.0}
        shutil.rmtree(directory)
        finetune(base, directory, recipe, training_rows(), **{**changes, **keys})
    return keys


def trained_by_peft(
    base: Path, recipe: Recipe, keys: Mapping[str, object], lora: Mapping[str, object], num_micro_batches: int
) -> Trained:
    rates = ()
    if "loraplus_lr_ratio" in keys:
        rates = ((r"lora_B", recipe.learning_rate * 16.0),)
    words = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in lora.items())
    return train_plain(base, replace(recipe, lora=words, group_rates=rates), num_micro_batches=num_micro_batches)


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=torch.tensor(training_rows()[:2]), use_cache=False).logits
    return found


@pytest.mark.filterwarnings("ignore")  # of transformers about tiny models, and of PEFT about names that it corrects
@pytest.mark.parametrize(("family", "kind", "dtype", "num_micro_batches", "max_grad_norm"), cases())
def test_it_is_what_peft_trains(
    tmp_path: Path, family: str, kind: str, dtype: str, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    assert_is_what_peft_trains(tmp_path, family, kind, dtype, num_micro_batches, max_grad_norm)


def assert_is_what_peft_trains(
    tmp_path: Path, family: str, kind: str, dtype: str, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    base = save_base(family, tmp_path / "base")
    before = file_hash(base / "model.safetensors")
    keys = adapter_keys(AutoModelForCausalLM.from_pretrained(base), family, kind)
    recipe = replace(recipe_of(base, dtype), max_grad_norm=max_grad_norm)
    directory = tmp_path / "run"
    keys = finetuned(base, directory, recipe, num_micro_batches, keys)
    config = Config(directory / "run.yaml")
    output = config.output

    excluded = json.loads((output / "adapter_config.json").read_text())["exclude_modules"]
    assert (excluded is not None) == (family in WITH_VISION or kind == "a module whole"), excluded
    lora = in_peft(keys, excluded)
    wanted = trained_by_peft(base, recipe, keys, lora, num_micro_batches)
    saved = tuple(keys.get("lora_modules_to_save", ()))  # type: ignore[call-overload]
    adapter = {name: each for name, each in wanted.weights.items() if "lora_" in name or name.startswith(saved or "?")}
    found = load_file(output / "adapter_model.safetensors")
    assert found.keys() == {saved_name(name) for name in adapter}
    different = [
        name
        for name, each in adapter.items()
        if not torch.equal(found[saved_name(name)], each.to(found[saved_name(name)].dtype))
    ]
    assert different == []
    assert not any(word in name for name in found for word in ("vision", "image", "audio"))
    assert [line["loss"] for line in config.metrics] == list(wanted.losses)
    assert [line["grad_norm"] for line in config.metrics] == list(wanted.norms)

    assert file_hash(base / "model.safetensors") == before
    written = sum(line["nvme_written_bytes"] for line in config.metrics)
    # Each commit has a page of its own. What is updated before clipping is certain is written again then.
    num_writes = NUM_STEPS + sum(line["clipped"] for line in config.metrics)
    assert 0 < written <= num_writes * (trained_bytes(config) + PAGE_BYTES)

    if family in LOST_BY_PEFT:
        ended = ratel("verify", config)
        assert ended.code == 4 and f"{LOST_BY_PEFT[family]} differs from step" in ended.stderr, ended.stderr
        return
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype]), output)
    assert torch.equal(logits_of(loaded), logits_of(as_peft_has_it(base, dtype, lora, wanted)))
    assert "bit for bit" in works("verify", config).stdout


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_buffer_of_a_layer_with_an_adapter_is_that_of_the_files(tmp_path: Path) -> None:
    """A router made as a linear layer, with a bias for each expert that is a buffer."""
    assert_is_what_peft_trains(tmp_path, "glm4_moe_lite", "lora", "float32", 1, None)


def trained_bytes(config: Config) -> int:
    """What the store has of all blocks that are trained."""
    with (
        open_queue("threads", notice=pytest.fail) as queue,
        Store.open([config.store.parent], queue=queue, identity=None) as store,
    ):
        blocks = [each for each in store.current().blocks if "frozen" not in [of.name for of in each.record.fields]]
        assert 0 < len(blocks) < len(store.blocks)
        return sum(each.num_bytes for each in blocks)


def as_peft_has_it(base: Path, dtype: str, lora: Mapping[str, object], trained: Trained) -> nn.Module:
    """PEFT's model with what plain PyTorch has trained."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[dtype])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, LoraConfig(**lora))  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in peft.base_model.model.named_parameters():
            if "lora_" in name or ".modules_to_save." in name:
                parameter.copy_(trained.weights[name.replace(".modules_to_save.default", "")])
    return peft


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sample(REFUSED, every=len(REFUSED), offset=7))
def test_what_can_have_no_adapter_is_refused(tmp_path: Path, family: str) -> None:
    """By the run and by `ratel check`, before anything is written; the hint says how else."""
    base = save_base(family, tmp_path / "base")
    keys = {"adapter": "lora", "lora_r": 2}
    with pytest.raises(Refused, match=REFUSED[family]):
        finetune(base, tmp_path / "run", recipe_of(base, "float32"), training_rows(), **keys)
    assert "hint: " in ratel("check", tmp_path / "run" / "run.yaml").stderr


def test_the_draw_has_what_it_must() -> None:
    """Two mixtures of experts, a model with a vision tower, twelve families, and every pair of settings."""
    chosen = [each.values for each in cases() if pytest.mark.nightly not in each.marks]
    families = [family for family, *_ in chosen]
    assert len(families) >= 12 and len({*families} & {*EXPERTS}) == 2 and len({*families} & {*WITH_VISION}) == 1
    assert {tuple(settings) for _, *settings in chosen} == {tuple(each) for each in SETTINGS}
    assert {*EXPERTS, *WITH_VISION, *REFUSED} <= RESULTS.keys()
    assert sorted({family for family, *_ in (each.values for each in cases())}) == sorted(ADAPTABLE)
