"""A model's blocks from its config.json alone, or from the shape of a GPT: for plans without weights and torch.

`cli.plan` calls it. Families that `planning.estimate.families` knows come out as `model.blocks` finds them in the
skeleton, parameter by parameter; others are taken for a Llama, and `is_estimated` says so. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ratel_cli.errors import BadInput
from ratel_cli.model.spec import BlockKind, ModelSpec, check_depth, lay_out_block
from ratel_cli.planning.estimate.config_values import ConfigValues
from ratel_cli.planning.estimate.families import FAMILIES, GPT, UNKNOWN
from ratel_cli.planning.estimate.rows import DEFAULTS, Family, Rows

_Parameter = tuple[str, tuple[int, ...], bool]
"""As `lay_out_block` takes it: name, shape, whether weight decay applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """What a layer computes with and its parameters do not tell."""

    num_heads: int
    head_dim: int
    active_experts: int = 1
    """Of a stack of experts, those that a token visits."""


def spec_from_config(config: Mapping[str, object], *, name: str) -> ModelSpec:
    """The blocks of the model that `config`, the content of a config.json, describes. Raises BadInput."""
    family, values = _family(config)
    return _spec(family, values, name=name, architecture=family.architecture or _architecture(config))


def traits_from_config(config: Mapping[str, object]) -> LayerTraits:
    """What `config` says about its layers besides. Raises BadInput."""
    family, values = _family(config)
    return LayerTraits(
        num_heads=values.number("num_attention_heads"),
        head_dim=values.number("head_dim"),
        active_experts=values.number("num_experts_per_tok") if _has_experts(family, values) else 1,
    )


def is_estimated(config: Mapping[str, object]) -> bool:
    """Whether the family is not known, so that its layers are taken for those of a Llama."""
    return config.get("model_type") not in FAMILIES


def spec_from_shape(
    *, name: str, num_layers: int, hidden_size: int, vocab_size: int, num_parameters: int | None = None
) -> ModelSpec:
    """The papers' GPT: 12 h^2 in the matrices of a layer, and a tied head.

    What a nominal `num_parameters` has on top of the shape's lies in the layers as vectors: it is moved and
    updated and costs no FLOPs. One that has less was rounded down, and the shape's holds.
    """
    shape = {"hidden_size": hidden_size, "vocab_size": vocab_size, "num_hidden_layers": num_layers}
    values = ConfigValues(shape, {**DEFAULTS, **GPT.defaults})
    spec = _spec(GPT, values, name=name, architecture=GPT.architecture)
    unlisted = ((num_parameters or 0) - spec.num_parameters) // num_layers
    if unlisted <= 0:
        return spec
    return _spec(GPT, values, name=name, architecture=GPT.architecture, besides=(("unlisted", (unlisted,), False),))


def _family(config: Mapping[str, object]) -> tuple[Family, ConfigValues]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadInput("config.json: `model_type` is missing, or no text")
    if config.get("is_encoder_decoder"):
        raise BadInput(f"{model_type} is an encoder-decoder; only decoder language models can be fine-tuned")
    family = FAMILIES.get(model_type, UNKNOWN)
    return family, ConfigValues(config, {**DEFAULTS, **family.defaults})


def _architecture(config: Mapping[str, object]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else str(config["model_type"])


def _spec(
    family: Family, values: ConfigValues, *, name: str, architecture: str, besides: tuple[_Parameter, ...] = ()
) -> ModelSpec:
    """`besides` is in every layer, after its rows."""
    num_layers = values.number("num_hidden_layers")
    check_depth(num_layers)
    sparse = _sparse_layers(family, values, num_layers)
    dense_layer = [*_parameters(family.layer, values), *besides] if len(sparse) < num_layers else []
    sparse_layer = [*_parameters(family.sparse_layer, values), *besides] if sparse else []
    groups: list[tuple[BlockKind, str, list[_Parameter]]] = [
        ("embedding", "embedding", _parameters(family.embedding, values))
    ]
    for index in range(num_layers):
        layer = sparse_layer if index in sparse else dense_layer
        renamed = [(f"{family.layers}.{index}.{name}", shape, decay) for name, shape, decay in layer]
        groups.append(("layer", f"layer {index}", renamed))
    groups.append(("head", "head", _parameters(family.head, values)))
    return ModelSpec(
        name=name,
        architecture=architecture,
        blocks=tuple(
            lay_out_block(index=index, kind=kind, name=block_name, parameters=parameters)
            for index, (kind, block_name, parameters) in enumerate(groups)
        ),
        tied=values.flag("tie_word_embeddings"),
        hidden_size=values.number("hidden_size"),
        vocab_size=values.number("vocab_size"),
    )


def _parameters(rows: Rows, values: ConfigValues) -> list[_Parameter]:
    return [
        (row.name, tuple(values.width(width) for width in row.shape), _decays(row.name, len(row.shape)))
        for row in rows
        if all(values.flag(condition) for condition in row.conditions)
    ]


def _decays(name: str, num_dimensions: int) -> bool:
    """The rule of `model.blocks`, which may not be imported here: matrices decay, norms and biases do not."""
    return num_dimensions >= 2 and not name.endswith("bias") and "norm" not in name


def _sparse_layers(family: Family, values: ConfigValues, num_layers: int) -> frozenset[int]:
    """Layers with experts."""
    if not _has_experts(family, values):
        return frozenset()
    first, stride = values.number("first_k_dense_replace", least=0), values.number("decoder_sparse_step")
    return frozenset(index for index in range(first, num_layers) if (index + 1) % stride == 0) - values.indices(
        "mlp_only_layers"
    )


def _has_experts(family: Family, values: ConfigValues) -> bool:
    return bool(family.sparse_layer) and values.number("num_experts", least=0) > 0
