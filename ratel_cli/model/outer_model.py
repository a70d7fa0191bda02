"""The outer model of a language model: a model with more parts, such as a vision tower, that a run does not train.

A run trains the language model alone, by itself, as its own class in transformers. The outer model is only a skeleton
with the names of the checkpoint: it says which tensors of the files are the language model's. All others are kept.

Invariant: the language model computes on rows of text exactly what the outer model does. `check_same_on_text` runs both
around their layers, whatever their size, and rejects an outer model that does anything else.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_flatten
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from ratel_cli.errors import BadInput
from ratel_cli.model.blocks import find_stack
from ratel_cli.model.kind import whole_class
from ratel_cli.model.skeleton import NAMES_OF_DTYPES, build_skeleton, build_whole

_NUM_TOKENS = 6
_CANNOT_RUN = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, AssertionError)
"""What a model's code raises where it is called with something else than it is made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterModel:
    """A skeleton of the outer model, and where the language model is in it."""

    model: PreTrainedModel
    language_config: PretrainedConfig
    """The configuration of the language model alone."""
    names: Mapping[str, str]
    """For each parameter and buffer of the language model, by its name in the outer model, its name in its own."""


def outer_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class of the outer model if the weights that `config` describes are such a model's; None if they are not.

    transformers must have a causal language model for the language part, and know the class that the config names.
    """
    text = config.get_text_config()
    is_part = any(getattr(config, key, None) is text for key in config.sub_configs)
    if not is_part or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found = getattr(transformers, whole_class(config) or "", None)
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel) or found.config_class is type(text):
        return None
    return found


def find_outer(config: PretrainedConfig) -> OuterModel | None:
    """The outer model that `config` describes; None if it describes a language model.

    Raises BadInput if it cannot be built, or if its language part cannot be trained by itself.
    """
    whole_class = outer_class(config)
    if whole_class is None:
        return None
    whole = build_whole(config, whole_class)
    language_config = copy.deepcopy(config.get_text_config())
    head = whole.get_output_embeddings()
    embedding = whole.get_input_embeddings()
    language_config.tie_word_embeddings = head is not None and head.weight is embedding.weight
    language = build_skeleton(language_config, dtype="float32", attn_implementation="eager")
    names = _names(whole, language)
    if names is None:
        raise _no_part(whole, language, "its parameters are not found in it")
    check_same_on_text(whole, language, names)
    return OuterModel(model=whole, language_config=language_config, names=names)


def language_part(outer: OuterModel, whole: PreTrainedModel, *, attention: str) -> PreTrainedModel:
    """The language model by itself, as its own class, with the parameters of a loaded `whole` model."""
    dtype = NAMES_OF_DTYPES[whole.dtype]
    model = build_skeleton(outer.language_config, dtype=dtype, attn_implementation=attention)
    state = whole.state_dict()
    model.load_state_dict({own: state[name] for name, own in outer.names.items()}, strict=False, assign=True)
    model.tie_weights()
    model.eval()
    return model


def check_same_on_text(whole: PreTrainedModel, language: PreTrainedModel, names: Mapping[str, str]) -> None:
    """Raise BadInput unless both do the same around their layers with rows of text, given the same weights there.

    Layers are of the same class with the same configuration, so they are not run: what they are called with must be
    equal, to the last bit, and the logits that follow from the same output of the last layer. Parameters of the other
    parts stay without memory, so that code which reads them fails. Both models get random parameters around their
    layers.
    """
    own_names = {own: name for name, own in names.items()}
    _, layers = find_stack(language)
    paths = {id(module): name for name, module in language.named_modules()}
    layer_names = [paths[id(layer)] for layer in layers]
    others = [_path_in(language, name, own_names) for name in layer_names]
    within = {id(module) for layer in layers for module in layer.modules()}
    generator = torch.Generator().manual_seed(0)
    for module_name, module in language.named_modules():
        if id(module) in within:
            continue
        for attribute, parameter in module._parameters.items():
            name = f"{module_name}.{attribute}".lstrip(".")
            if parameter is None or name not in own_names:
                continue
            vector = torch.randn(parameter.shape[-1:], generator=generator)
            drawn = nn.Parameter(vector.expand(parameter.shape), requires_grad=False)  # in the memory of one row
            module._parameters[attribute] = drawn
            place, _, own_attribute = own_names[name].rpartition(".")
            whole.get_submodule(place)._parameters[own_attribute] = drawn
    whole.tie_weights()
    language.tie_weights()
    tokens = _text_tokens(whole.config, language.config)
    hidden = torch.randn((*tokens.shape, language.config.hidden_size), generator=generator)
    try:
        wanted = _around(language, [language.get_submodule(name) for name in layer_names], tokens, hidden)
        found = _around(whole, [whole.get_submodule(name) for name in others], tokens, hidden)
    except _CANNOT_RUN as error:
        raise _no_part(whole, language, "it cannot run on text alone") from error
    if not _is_same(found, wanted):
        raise _no_part(whole, language, "it does not compute there what it computes alone")


def _names(whole: PreTrainedModel, language: PreTrainedModel) -> dict[str, str] | None:
    """The names of the language model's tensors in the outer model, each with its own; None if it is not a part."""
    prefixes = _prefixes(whole, type(language))
    if len(prefixes) == 1:
        pairs = {f"{prefixes[0]}.{name}": name for name in language.state_dict()}
    else:
        own, inner = language.base_model_prefix, type(language.base_model)
        prefixes = _prefixes(whole, inner)
        if len(prefixes) != 1 or inner is type(language):
            return None
        pairs = {f"{prefixes[0]}.{name}": f"{own}.{name}" for name in language.base_model.state_dict()}
        head = _name_of(whole, whole.get_output_embeddings())
        own_head = _name_of(language, language.get_output_embeddings())
        if head is None or own_head is None:
            return None
        outputs = language.get_submodule(own_head).state_dict()
        pairs |= {f"{head}.{name}": f"{own_head}.{name}" for name in outputs}
    state, own_state = whole.state_dict(), language.state_dict()
    is_same = all(name in state and state[name].shape == own_state[own].shape for name, own in pairs.items())
    return pairs if is_same and set(pairs.values()) == set(own_state) else None


def _prefixes(whole: PreTrainedModel, part: type[nn.Module]) -> list[str]:
    return [name for name, module in whole.named_modules() if type(module) is part and name]


def _name_of(model: nn.Module, module: nn.Module | None) -> str | None:
    return next((name for name, each in model.named_modules() if each is module), None)


def _path_in(language: PreTrainedModel, module_name: str, own_names: Mapping[str, str]) -> str:
    """The name in the outer model of a module of the language model."""
    within = next(iter(language.get_submodule(module_name).state_dict()))
    return own_names[f"{module_name}.{within}"].removesuffix(f".{within}")


def _text_tokens(*configs: PretrainedConfig) -> torch.Tensor:
    """Token ids `[2, tokens]` without a meaning of their own: the configurations name none of them."""
    named = {value for config in configs for value in tree_flatten(config.to_dict())[0] if isinstance(value, int)}
    plain = [token for token in range(configs[-1].vocab_size) if token not in named]
    return torch.tensor((plain * 2 * _NUM_TOKENS)[: 2 * _NUM_TOKENS] or [0] * 2 * _NUM_TOKENS).reshape(2, -1)


def _around(
    model: PreTrainedModel, layers: list[nn.Module], tokens: torch.Tensor, hidden: torch.Tensor
) -> list[object]:
    """What the layers are called with, and the logits if the last one's output is `hidden`, as a flat list."""
    error: Exception | None = None
    for wrap in (lambda: hidden, lambda: (hidden,), lambda: (hidden, None)):
        calls: list[object] = []
        for layer in layers:
            layer.forward = lambda *arguments, _wrap=wrap, _calls=calls, **keywords: (
                _calls.append((arguments, keywords)) or _wrap()
            )
        try:
            with torch.no_grad():
                logits = model.eval()(input_ids=tokens, use_cache=False).logits
            assert logits.shape[:2] == tokens.shape
            return tree_flatten([calls, logits])[0]
        except _CANNOT_RUN as failure:
            error = error or failure
    assert error is not None
    raise error


def _is_same(found: list[object], wanted: list[object]) -> bool:
    def equal(one: object, other: object) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
        return type(one) is type(other) and (one == other or not isinstance(one, str | int | float | bool))

    return len(found) == len(wanted) and all(map(equal, found, wanted))


def _no_part(whole: PreTrainedModel, language: PreTrainedModel, reason: str) -> BadInput:
    return BadInput(
        f"config.json: {type(whole).__name__} ({whole.config.model_type}) has more parts than its language model "
        f"({language.config.model_type}), which cannot be trained within it: {reason}",
        'save the language model as a model of its own and train that; docs/guide.md shows how, in "Models"',
    )
