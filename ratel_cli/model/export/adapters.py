"""LoRA adapters: PEFT's own modules in a skeleton, drawn by PEFT's rule, and the files that PEFT loads.

PEFT puts its modules into the skeleton before blocks are found. So an adapter is a block that is trained, in fp32,
beside its frozen matrix, and the forward that runs is PEFT's. A parameter of the base is then called
`q_proj.base_layer.weight`; `base_name` is its name without that, as the base model's files have it. Modules that PEFT
would copy and train (`modules_to_save`) are trained where they are: the frozen ones beside them would never be used.

Invariant: an adapter begins with the bits that `torch.manual_seed(seed)` and `get_peft_model` give it.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ratel_cli.errors import BadInput, excerpt, first_line
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.merged_weights import AdaptedMatrix, TrainedRows
from ratel_cli.model.files.quantised_modules import QuantisedLinear
from ratel_cli.model.values.adapter_settings import ALL_LINEAR, AdapterSettings, base_name, is_of_tokens
from ratel_cli.model.values.fetched_code import no_fetched_code
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.blocks import ParameterSpec
from ratel_cli.sizes import Task

with no_fetched_code():
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import Linear, LoraLayer, ParamWrapper
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import cast_adapter_dtype, check_target_module_exists
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

NAME = "default"
"""PEFT's name of the one adapter."""
MAGNITUDES = "lora_magnitude_vector"
_TASK_TYPES: dict[Task, str | None] = {"causal_lm": "CAUSAL_LM", "masked_lm": None, "seq2seq": "SEQ_2_SEQ_LM"}


def inject(model: PreTrainedModel, settings: AdapterSettings) -> LoraConfig:
    """Put the adapter's modules into the model, which is then frozen but for them. Returns the configuration as PEFT
    has completed it. Raises BadInput with PEFT's reason if the model cannot have them."""
    targets, saved = settings.target_modules, _saved_modules(model, settings)
    excluded = _other_parts(model, settings.task)
    excluded += [rf"(.*\.)?{re.escape(name)}(\..*)?" for name in settings.saved_modules]
    config = LoraConfig(
        task_type=_TASK_TYPES[settings.task],
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets) or None,
        target_parameters=list(settings.target_parameters) or None,
        exclude_modules="|".join(excluded) or None,
        use_rslora=settings.scales_by_root,
        use_dora=settings.has_magnitudes,
        init_lora_weights=settings.initialisation,
        trainable_token_indices=_trained_rows(model, settings) or None,
    )
    try:
        convert_peft_config_for_transformers(config, model, None)  # names of experts that were modules once
        _check_names(model, settings, config)
        _choose_layers(model, settings, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it corrects what concerns Conv1D
            inject_adapter_in_model(config, model, adapter_name=NAME)
            cast_adapter_dtype(model, NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        if ParamWrapper.__name__ in str(error):
            # Stacks of experts are no modules: PEFT adds their adapters to their matrices in forward.
            raise BadInput(
                f"adapter: the experts of {type(model).__name__} are stacked: their adapters allow neither dropout "
                "nor DoRA, and their matrices must not be quantised",
                "set lora_dropout: 0, peft_use_dora: false and quantize_moe_experts: false, or name the other modules, "
                "such as lora_target_modules: [q_proj, k_proj, v_proj, o_proj]",
            ) from error
        message = f"adapter: {type(model).__name__}: {first_line(error)}"
        raise _about("lora_target_modules", message, "lora_target_modules names modules by their ends") from error
    for module in saved:
        module.requires_grad_(True)
    config.modules_to_save = list(settings.saved_modules) or None
    config.ensure_weight_tying = settings.ties_saved
    for each in model.modules():
        if isinstance(each, TrainableTokensLayer):
            # They are for PEFT's unmerge, which nothing calls here.
            each.trainable_tokens_original.clear()  # type: ignore[no-untyped-call]
    _check_adapted(model, settings)
    return config


def _trained_rows(model: PreTrainedModel, settings: AdapterSettings) -> dict[str, list[int]]:
    """The tokens whose rows are trained, by the names of the matrices: those ends of the model that are not trained
    whole. A head that shares the embedding's matrix shares its rows. Raises BadInput for a head with a bias."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    is_tied = _are_tied(ends)
    named = {name: module for name, module in model.named_modules() if module in ends[: 1 if is_tied else 2]}
    saved = tuple(f".{end}" for end in settings.saved_modules)
    found = {name: list(settings.tokens) for name in named if settings.tokens and not f".{name}".endswith(saved)}
    if found and ends[1] is not None and ends[1].bias is not None:
        raise BadInput(
            f"tokens: the head of {type(model).__name__} has a bias, which PEFT (0.21) leaves out where it trains the "
            "rows of tokens",
            f"set lora_modules_to_save: [{', '.join(each.rpartition('.')[2] for each in named)}]"
            + (" and peft_ensure_weight_tying: true" if is_tied else ""),
        )
    return found


def _are_tied(ends: list[nn.Module | None]) -> bool:
    """Whether embedding and head have one matrix. Configurations say it in more than one place, or not at all."""
    embedding, head = ends
    return embedding is not None and head is not None and head.weight is embedding.weight


def _choose_layers(model: PreTrainedModel, settings: AdapterSettings, config: LoraConfig) -> None:
    """Let the configuration have the chosen layers alone, and no stack of a module that must have no adapter. PEFT
    chooses modules so; of parameters it takes all whose names end so, and those that are chosen get whole names."""
    if settings.layers:
        if config.target_modules == ALL_LINEAR:
            config.target_modules = sorted(_linear_names(model))
        config.layers_to_transform = list(settings.layers)
    if config.target_parameters and (settings.layers or config.exclude_modules):
        named = replace(config, target_modules=list(config.target_parameters), target_parameters=None)
        ends = tuple(f".{end}" for end in config.target_parameters)
        everywhere = {name for name, _ in model.named_parameters() if f".{name}".endswith(ends)}
        chosen = {name for name in everywhere if check_target_module_exists(named, name)}
        config.target_parameters = config.target_parameters if chosen == everywhere else sorted(chosen)


def _check_names(model: PreTrainedModel, settings: AdapterSettings, config: LoraConfig) -> None:
    """Raise BadInput if the model has no such layer, or no module of any of these names: PEFT's own words name neither
    what there is, nor which of the two is wrong. `config`: with names that PEFT has converted to those of stacks."""
    number: object = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if isinstance(number, int) and not model.config.is_encoder_decoder:
        for layer in (each for each in settings.layers if each >= number):
            message = f"lora_layers_to_transform: there is no layer {layer}: {type(model).__name__} has {number}"
            raise _about("lora_layers_to_transform", message, f"layers are numbered from 0 to {number - 1}")
    wanted = settings.target_modules
    if wanted == ALL_LINEAR or not wanted or config.target_parameters:
        return
    if isinstance(wanted, str):
        _check_expression(model, wanted)
        return
    names = [f".{name}" for name, _ in model.named_modules()]
    if any(name.endswith(f".{end}") for end in wanted for name in names):
        return
    there = _linear_names(model)
    close = get_close_matches(wanted[0], there, n=1)
    hint = f"did you mean {close[0]}?" if close else f"its linear layers are {', '.join(there)}"
    message = f"lora_target_modules: {type(model).__name__} has no module named {' or '.join(wanted)}"
    raise _about("lora_target_modules", message, hint)


def _check_expression(model: PreTrainedModel, expression: str) -> None:
    """Raise BadInput if a regular expression is none, or if no name of a module matches it."""
    try:
        pattern = re.compile(expression)
    except re.error as error:
        message = f"lora_target_modules: {excerpt(expression)} is no regular expression: {error}"
        raise _about("lora_target_modules", message, "names by their ends are a list: [q_proj, v_proj]") from error
    if not any(pattern.fullmatch(name) for name, _ in model.named_modules()):
        there = _linear_names(model)
        close = [name for name in there if re.search(rf"\b{re.escape(name)}\b", expression)]
        layer = next(name for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D))
        message = (
            f"lora_target_modules: one string is a regular expression, and no module of {type(model).__name__} has a"
            f" name that it matches whole; one is {layer}"
        )
        hint = f"write a list of the ends of names, such as [{', '.join(close or there[:2])}], or whole names"
        raise _about("lora_target_modules", message, hint)


def _about(key: str, message: str, hint: str) -> BadInput:
    """The error for the value of a key."""
    found = BadInput(message, hint)
    found.key = (key,)
    return found


def _check_adapted(model: PreTrainedModel, settings: AdapterSettings) -> None:
    """Raise BadInput if something has an adapter that must have none, or the other way round."""
    layers = {name: each for name, each in model.named_modules() if isinstance(each, LoraLayer)}
    _reject_other_functions(layers)
    for name in (name for name, each in layers.items() if settings.has_magnitudes and not isinstance(each, Linear)):
        raise BadInput(f"peft_use_dora: {name} is no linear layer", "set peft_use_dora: false, or name other modules")
    unknown = (each for each in settings.also_named if not any(name.endswith(each) for name in layers))
    for missing in (each for each in unknown if not _was_module(model, each)):
        raise BadInput(f"lora_target_modules: {missing}: no linear layer of the model's layers", "remove it")
    for name, module in model.named_modules():
        if module in (model.get_input_embeddings(), model.get_output_embeddings()) and "lora_" in str(module):
            raise BadInput(
                f"lora_target_modules: {name}: embedding and head can have no adapter", "name modules of layers"
            )


def _was_module(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT takes it for the name of modules of experts, which are stacks now."""
    probe = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(probe, model, None)
    except ValueError:  # a stack has what several of them had
        return True
    return name not in (probe.target_modules or ())


def _reject_other_functions(layers: Mapping[str, LoraLayer]) -> None:
    """Raise BadInput for layers whose own code does something else with their weights than a linear layer does, such as
    a router's, which returns several tensors: PEFT adds its adapter to what a linear layer would return."""
    for name, layer in layers.items():
        inner = layer.get_base_layer()
        is_known = type(inner).forward in (nn.Linear.forward, QuantisedLinear.forward)
        if is_known or not isinstance(layer, Linear) or not isinstance(inner, nn.Linear):
            continue
        given = torch.zeros((2, inner.in_features), dtype=inner.weight.dtype, device=inner.weight.device)
        try:
            with torch.no_grad():
                made = inner(given)
        except (RuntimeError, ValueError, TypeError):
            made = None
        if not isinstance(made, torch.Tensor) or made.shape != (2, inner.out_features):
            end = name.rpartition(".")[2]
            message = f"adapter: {name}: {type(inner).__name__} is no linear layer, though it is made as one"
            raise _about("lora_target_modules", message, f"name the other modules, and not {end}")


def _saved_modules(model: PreTrainedModel, settings: AdapterSettings) -> list[nn.Module]:
    """The modules that are trained whole. Raises BadInput if a name is that of none."""
    found = list[nn.Module]()
    for end in settings.saved_modules:
        named = {name: each for name, each in model.named_modules() if name.endswith(end)}
        for name in (name for name in named if not f".{name}".endswith(f".{end}")):
            hint = f"write more of the name that you mean, such as model.{end}"
            raise BadInput(f"lora_modules_to_save: {end}: PEFT would take {name} too, whose name ends the same", hint)
        parameters = [each for module in named.values() for each in module.parameters()]
        if not any(each.numel() for each in parameters):
            raise BadInput(f"lora_modules_to_save: {end}: no module of the model with weights", "name it by its end")
        if not all(each.is_floating_point() for each in parameters):
            raise BadInput(f"lora_modules_to_save: {end} is quantised, and cannot be trained", "name others")
        found += named.values()
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tied, is_tied = set(found).intersection(ends), _are_tied(ends)
    if tied and is_tied and not settings.ties_saved:
        raise BadInput(
            f"lora_modules_to_save: embedding and head of {type(model).__name__} are one matrix, of which PEFT trains"
            " copies that differ",
            "set peft_ensure_weight_tying: true, or remove it",
        )
    if settings.ties_saved and not (tied and is_tied):
        raise BadInput(
            f"peft_ensure_weight_tying: lora_modules_to_save names no matrix that embedding and head of "
            f"{type(model).__name__} share",
            "remove it" if not is_tied else "add the embedding to lora_modules_to_save",
        )
    return found


def _other_parts(model: PreTrainedModel, task: Task) -> list[str]:
    """A regular expression for the modules that text does not use, such as a vision tower's, if there are some. An
    adapter there would not be trained. A model without such parts has one configuration for all that it has; outside of
    its decoder is then a part of its head, as BERT's."""
    if model.config.is_encoder_decoder or not model.config.sub_configs:
        return []
    names = {module: name for name, module in model.named_modules()}
    inside = names.get(model.get_decoder(), "")
    head = model.get_output_embeddings()
    linear = [name for module, name in names.items() if isinstance(module, nn.Linear | Conv1D) and module is not head]
    is_whole = not inside or all(name.startswith(f"{inside}.") for name in linear)
    return _unused_children(model, inside, task) if is_whole else [rf"(?!{re.escape(inside)}\.).*"]


def _unused_children(model: PreTrainedModel, inside: str, task: Task) -> list[str]:
    """Regular expressions for the modules that text does not use in a decoder that has such parts inside, as models of
    pictures and of speech: those of its children of which no block has anything."""
    decoder = model.get_submodule(inside)
    if not any(isinstance(module, PreTrainedModel) for module in decoder.modules() if module is not decoder):
        return []
    spec = find_blocks(copy.deepcopy(model), name=inside, task=task).spec
    used = {each.name for block in spec.blocks for each in block.parameters}
    children = [f"{inside}.{name}" for name, child in decoder.named_children() if list(child.parameters())]
    unused = [child for child in children if not any(name.startswith(f"{child}.") for name in used)]
    return [rf"{re.escape(child)}(\..*)?" for child in unused]


def _linear_names(model: PreTrainedModel) -> tuple[str, ...]:
    """The last parts of the names of all linear layers but the head."""
    linear = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D)]
    return tuple(
        sorted({name.rpartition(".")[2] for name, each in linear if each is not model.get_output_embeddings()})
    )


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return is_of_tokens(name) or any(part.startswith("lora_") for part in name.split("."))


def base_spec(spec: ModelSpec) -> ModelSpec:
    """The model without its adapters, with the names that the base model's files have."""
    blocks = []
    for block in spec.blocks:
        kept = tuple(
            replace(each, name=base_name(each.name)) for each in block.parameters if not is_of_adapter(each.name)
        )
        blocks.append(replace(block, parameters=kept))
    return replace(spec, blocks=tuple(blocks))


def trained_parameters(spec: ModelSpec) -> list[ParameterSpec]:
    """What an adapter consists of: all that is trained beside a frozen base."""
    return [each for block in spec.blocks if block.is_trained for each in block.parameters]


def adapted_matrices(model: nn.Module, spec: ModelSpec) -> dict[str, AdaptedMatrix]:
    """What is added to each parameter that has an adapter, by its name without it. Raises BadInput if that is no
    matrix of a linear layer, and no stack of experts."""
    stored = {base_name(each.name): (block, each) for block in spec.blocks for each in block.parameters}
    found = {}
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        name = f"{base_name(path)}.{layer.parameter_name if isinstance(layer, ParamWrapper) else 'weight'}"
        if name not in stored or not isinstance(layer, Linear | ParamWrapper):
            raise BadInput(
                f"{path}: its adapter is not that of a linear layer", "merge it with PEFT: merge_and_unload()"
            )
        block, matrix = stored[name]
        found[name] = AdaptedMatrix(
            matrix=matrix.name,
            first=f"{path}.lora_A.{NAME}.weight",
            second=f"{path}.lora_B.{NAME}.weight",
            magnitudes=f"{path}.{MAGNITUDES}.{NAME}.weight" if layer.use_dora[NAME] else None,
            shape=matrix.shape,
            dtype=VALUE_DTYPES[block.dtype],
            scaling=layer.scaling[NAME],
            is_inputs_first=layer.fan_in_fan_out if isinstance(layer, Linear) else not layer._did_swap_in_out_features,
            num_experts=0 if isinstance(layer, Linear) else layer.num_experts,
        )
    return found


def magnitudes_of(adapted: Mapping[str, AdaptedMatrix]) -> dict[str, AdaptedMatrix]:
    """By the name of the magnitudes: what they are the first lengths of."""
    return {each.magnitudes: each for each in adapted.values() if each.magnitudes is not None}


def trained_rows(spec: ModelSpec, tokens: tuple[int, ...]) -> tuple[TrainedRows, ...]:
    """The rows that an adapter trains of the embedding and the head, of these tokens."""
    dtypes = {base_name(each.name): VALUE_DTYPES[block.dtype] for block in spec.blocks for each in block.parameters}
    found = []
    for each in filter(lambda each: is_of_tokens(each.name), spec.parameters):
        matrix = f"{each.name.partition('.token_adapter.')[0]}.weight"
        found.append(TrainedRows(each.name, tokens, each.shape[1], matrix, dtypes[matrix]))
    return tuple(found)


def drawn_adapter(plain: PreTrainedModel, settings: AdapterSettings, *, seed: int) -> dict[str, torch.Tensor]:
    """The values in fp32 with which the adapter begins, by name. `plain`: the skeleton without adapters, which gets
    them."""
    _hollow_out(plain)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject(plain, replace(settings, has_magnitudes=False, tokens=()))  # they draw nothing
        return {name: each.detach() for name, each in plain.named_parameters() if is_of_adapter(name)}


def _hollow_out(model: nn.Module) -> None:
    """Give the model parameters on the CPU that have shapes and take no memory: PEFT draws its own where the base's
    are. What modules share they share afterwards."""
    hollow = dict[nn.Parameter, nn.Parameter]()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shape = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                module._parameters[name] = hollow.setdefault(parameter, nn.Parameter(shape, requires_grad=False))
