"""A Hugging Face decoder without its weights: parameters on the meta device, buffers real.

`run.inputs` builds one skeleton per run; `model.blocks` finds the blocks in it and `engine` binds
weights to it one block at a time. Nothing here knows any model family, and no memory is spent on
weights: a 100B skeleton costs what its Python objects cost.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ratel_cli.errors import BadInput
from ratel_cli.model.directory import check_companions
from ratel_cli.model.spec import check_depth
from ratel_cli.sizes import DtypeName

DTYPES: dict[DtypeName, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


_PROBABILITIES = ("dropout", "_pdrop", "_dropout_prob")


def read_model_config(directory: Path) -> PretrainedConfig:
    """The model's configuration. Raises BadInput when transformers does not know it without remote code."""
    check_companions(directory)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise BadInput(
            f"{directory / 'config.json'}: not a model configuration that transformers knows: {_first_line(error)}",
            "remote code is never run; use a model that transformers supports itself",
        ) from error
    num_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(num_layers, int):
        check_depth(num_layers)
    return cast(PretrainedConfig, config)


def build_skeleton(config: PretrainedConfig, *, dtype: DtypeName, attn_implementation: str) -> PreTrainedModel:
    """Construct the causal language model of `config` with meta parameters and real buffers.

    `torch.device("meta")` would also lose the buffers (rotary frequencies, causal masks), so only
    the registration of parameters is diverted. Raises BadInput for models that are no decoders.
    """
    _refuse_unsupported(config)
    _refuse_contradictions(config)
    config = copy.deepcopy(config)  # from_config writes its arguments into it
    config.use_cache = False
    try:
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[dtype], attn_implementation=attn_implementation, trust_remote_code=False
            )
    except Exception as error:
        raise BadInput(
            f"config.json: cannot build a {config.model_type} language model from it: "
            f"{type(error).__name__}: {_first_line(error)}",
            "check the values in the model's config.json",
        ) from error
    model.train()
    return cast(PreTrainedModel, model)


def supported_attention(config: PretrainedConfig, wanted: str) -> str:
    """`wanted` where the model has it, else `eager`, which every model has."""
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=wanted, trust_remote_code=False)
    except Exception:  # noqa: BLE001  if the config is what is wrong, building with eager will say so
        return "eager"
    return wanted


def _refuse_unsupported(config: PretrainedConfig) -> None:
    """Options whose loss terms or side outputs the block-wise step would silently drop."""
    for option, meaning in (
        ("output_router_logits", "the auxiliary router loss"),
        ("output_hidden_states", "hidden states of every layer"),
        ("output_attentions", "attention maps"),
    ):
        if getattr(config, option, False):
            raise BadInput(
                f"config.json sets {option}: true, and {meaning} cannot be had when layers pass one at a time",
                f"set {option}: false in the model's config.json",
            )
    for option in ("layerdrop", "layer_dropout"):
        if getattr(config, option, 0.0):
            raise BadInput(f"config.json sets {option}: layers that are skipped at random are not supported")
    if getattr(config, "is_encoder_decoder", False):
        raise BadInput(f"{config.model_type} is an encoder-decoder; only decoder language models can be fine-tuned")


def _refuse_contradictions(config: PretrainedConfig) -> None:
    """Values that transformers takes, and of which its layers complain only when they run."""
    for key, value in config.to_dict().items():
        if key.endswith(_PROBABILITIES) and isinstance(value, int | float) and not 0 <= value <= 1:
            raise BadInput(f"config.json: {key} is {value}; a probability is between 0 and 1")
    heads, shared = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise BadInput(
            f"config.json: {shared} key-value heads cannot be shared by {heads} attention heads",
            "num_attention_heads must be a multiple of num_key_value_heads",
        )


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter registered inside becomes a meta parameter; shared ones stay shared."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
