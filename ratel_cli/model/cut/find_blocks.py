"""Finds the blocks of any Hugging Face model with one stack of layers, or with an encoder and a decoder.

`find_blocks` turns a skeleton into a `DecoderModel`. It finds the embedding, the list of layers, and the parameters
before and after the layers (`probe` runs the model to learn these), and lays out the `ModelSpec`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.around_layers import reject_other_pairs, reject_other_text, reject_what_passes_all_layers
from ratel_cli.model.cut.binding import PlacedParameter, cut_into_blocks, laid_out, placed_parameters
from ratel_cli.model.cut.cut_model import placeholder
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.layer_runner import CANNOT_RUN, LayerRunner
from ratel_cli.model.cut.probe import SAMPLE_TOKENS, Usage, probe_usage, separates_samples
from ratel_cli.model.cut.trials import ROW_TOKENS, carried_bytes, counts_positions_from_zero, ordinary_row
from ratel_cli.model.cut.two_stacks import AnyRunner, TwoStackRunner
from ratel_cli.model.files.skeleton import NAMES_OF_DTYPES
from ratel_cli.model.values.adapter_settings import is_of_tokens
from ratel_cli.model.values.carried import Embedded
from ratel_cli.model.values.rate_groups import ONE_RATE, RateGroups
from ratel_cli.model.values.row_lookup import RowLookup
from ratel_cli.model.values.spec import ROTARY_BYTES, TOKEN_BYTES, LayerTraits, ModelSpec, is_matrix
from ratel_cli.schedule.rules import ALL_ADAMW, RuleChoice
from ratel_cli.sizes import VALUE_BYTES, DtypeName, Task

_CLASS_BYTES = 32
"""Bytes for each row and class: logits in the model's dtype and in fp32, their gradients, and what the loss makes of
them."""


def find_blocks(
    skeleton: PreTrainedModel,
    *,
    name: str,
    gradient_dtype: DtypeName | None = None,
    task: Task = "causal_lm",
    rates: RateGroups = ONE_RATE,
    rules: RuleChoice = ALL_ADAMW,
) -> DecoderModel:
    """Find embedding, layers and head in `skeleton`, made for `task`. Raises BadInput if the model cannot be streamed.

    `name` is the model's name in its spec. `gradient_dtype`: in which gradients leave the device; None: in the model's
    own dtype. `rates`: which parameters have a learning rate of their own. `rules`: how what is trained is updated.
    The skeleton is changed: its parameters become unbound ones.
    """
    found = _find_two_stacks(skeleton) if task == "seq2seq" else _find_one_stack(skeleton, task)
    return found.model(name, task, gradient_dtype, rates, rules)


def _find_one_stack(skeleton: PreTrainedModel, task: Task) -> _Found:
    """Find the blocks of a model with one stack of layers. Raises BadInput as `find_blocks`."""
    classifies = task == "classification"
    embedding, head = _input_and_output(skeleton, has_output=not classifies)
    owner, layers = find_stack(skeleton)
    tied = head is not None and head.weight is embedding.weight
    outside, inside = _placed_parameters(skeleton, layers)
    for parameter in outside:
        parameter.unbind()
    layer_runner = LayerRunner(skeleton, skeleton if classifies else owner, layers)
    if task != "causal_lm":
        layer_runner.takes_positions = False  # samples are not packed, and the model's own code knows where they begin
    first = next(each for each in outside if each.unbound is embedding.weight)
    lookup = RowLookup(embedding)
    usage, embedded = probe_usage(layer_runner, {each.name: each.unbound for each in outside}, first.name, lookup)
    used = [each for each in outside if each is first or each.name in usage.before | usage.after]
    unused = [each for each in outside if each not in used]
    for parameter in unused:
        parameter.put(nn.Parameter(parameter.without_values(), requires_grad=False))  # code that reads it fails
    reject_what_passes_all_layers(layer_runner, used, vocab_size=first.shape[0])
    before, after = _split(used, usage, first, tied=tied)
    if layer_runner.takes_positions:
        layer_runner.takes_positions = counts_positions_from_zero(layer_runner, used, vocab_size=first.shape[0])
    if not classifies:
        reject_other_text(layer_runner, used, vocab_size=first.shape[0], has_other_parts=bool(unused))
    # Tables are there where no parameters give positions.
    has_tables = sum(len(each.shape) > 1 for each in before) == 1
    lent = [each for each in before[1:] if each.name in usage.after]
    return _Found(
        skeleton=skeleton,
        runner=layer_runner,
        segments=[
            ("embedding", before),
            *((f"layer {index}", parameters) for index, parameters in enumerate(inside)),
            ("head", [*after, *(before[:1] if tied else []), *lent]),
        ],
        embedded=embedded,
        used=used,
        lookup=lookup,
        masks_separate=layer_runner.takes_positions and separates_samples(embedded.calls),
        has_other_parts=bool(unused),
        batch_bytes=TOKEN_BYTES + (ROTARY_BYTES if has_tables else 0),
        loss_bytes=len(skeleton.config.id2label or ()) * _CLASS_BYTES if classifies else 0,
        looks_up_rows=usage.looks_up_rows,
        substitutes=usage.substitutes,
    )


def _find_two_stacks(skeleton: PreTrainedModel) -> _Found:
    """Find the blocks of an encoder-decoder: both stacks, with what is behind the encoder's layers between them. Raises
    BadInput as `find_blocks`."""
    embedding, head = _input_and_output(skeleton, has_output=True)
    assert head is not None
    tied = head.weight is embedding.weight
    encoder, decoder = (_stack_in(skeleton, module) for module in (skeleton.get_encoder(), skeleton.get_decoder()))
    layers = (*encoder[1], *decoder[1])
    outside, inside = _placed_parameters(skeleton, layers)
    for parameter in outside:
        parameter.unbind()
    runner = TwoStackRunner(skeleton, encoder, decoder)
    first = next(each for each in outside if each.unbound is embedding.weight)
    by_name = {each.name: each.unbound for each in outside}
    no_lookup = RowLookup(runner.layers[runner.bridge])
    below, above = (probe_usage(each, by_name, first.name, no_lookup)[0] for each in (runner.encoder, runner.decoder))
    parts = [
        [each for each in outside if each.name in names and (each is not first or place == 0)]
        for place, names in enumerate((below.before | above.before, below.after, above.after))
    ]
    parts[0].sort(key=lambda each: each is not first)
    used = [each for part in parts for each in part]
    if len(used) != len({each.name for each in used}) or (first.name in above.after and not tied):
        raise BadInput(
            f"{type(skeleton).__name__}: a parameter outside its layers is used in several places; only a tied"
            " embedding may be"
        )
    unused = [each for each in outside if each not in used]
    for parameter in unused:
        parameter.put(nn.Parameter(parameter.without_values(), requires_grad=False))  # code that reads it fails
    reject_what_passes_all_layers(runner.decoder, used, vocab_size=first.shape[0])
    reject_other_pairs(runner, used, vocab_size=first.shape[0])
    number = len(encoder[1])
    with torch.no_grad():
        embedded = runner.embed({"input_ids": torch.zeros((1, SAMPLE_TOKENS), dtype=torch.long)})
    return _Found(
        skeleton=skeleton,
        runner=runner,
        segments=[
            ("embedding", parts[0]),
            *((f"encoder layer {index}", parameters) for index, parameters in enumerate(inside[:number])),
            ("end of the encoder", parts[1]),
            *((f"decoder layer {index}", parameters) for index, parameters in enumerate(inside[number:])),
            ("head", [*parts[2], *(parts[0][:1] if tied else [])]),
        ],
        embedded=embedded,
        used=used,
        lookup=no_lookup,
        has_other_parts=bool(unused),
        batch_bytes=2 * TOKEN_BYTES,
        looks_up_rows=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The blocks of a skeleton, and what was seen while they were sought."""

    skeleton: PreTrainedModel
    runner: AnyRunner
    segments: Sequence[tuple[str, list[PlacedParameter]]]
    """Each with its parameters. The embedding's matrix is the first one."""
    embedded: Embedded
    """What is before the layers, for `SAMPLE_TOKENS` tokens."""
    used: Sequence[PlacedParameter]
    """The parameters outside the layers."""
    lookup: RowLookup
    has_other_parts: bool
    batch_bytes: int
    looks_up_rows: bool
    masks_separate: bool = False
    loss_bytes: int = 0
    substitutes: tuple[int, ...] = ()

    def model(
        self, name: str, task: Task, gradient_dtype: DtypeName | None, rates: RateGroups, rules: RuleChoice
    ) -> DecoderModel:
        """The model of these segments. The arguments are those of `find_blocks`."""
        skeleton, embedded, first = self.skeleton, self.embedded, self.segments[0][1][0]
        dtype = NAMES_OF_DTYPES[cast(torch.dtype, skeleton.config.dtype)]
        cut, hidden_size = cut_into_blocks(self.segments, dtype, rates, rules), embedded.hidden.numel() // SAMPLE_TOKENS
        carried = carried_bytes(
            self.runner,
            embedded,
            self.used,
            [parameters for _, parameters in self.segments[1:-1]],
            inputs=ordinary_row(skeleton, first.shape[0]),
            num_tokens=ROW_TOKENS,
            num_probed=SAMPLE_TOKENS,
            value_bytes=VALUE_BYTES[dtype],
        )
        waiting = 0 if embedded.second is None else hidden_size * VALUE_BYTES[dtype]
        spec = ModelSpec(
            name=name,
            architecture=type(skeleton).__name__,
            blocks=laid_out(cut, dtype=dtype, gradient_dtype=gradient_dtype, looked_up=first),
            segment_names=tuple(segment for segment, _ in self.segments),
            dtype=dtype,
            hidden_size=hidden_size,
            vocab_size=first.shape[0],
            carried_bytes=carried + waiting,
            batch_bytes=self.batch_bytes,
            loss_bytes=self.loss_bytes,
            looks_up_rows=self.looks_up_rows,
            substitutes=self.substitutes,
        )
        return DecoderModel(
            skeleton=skeleton,
            layer_runner=self.runner,
            spec=spec,
            traits=_layer_traits(skeleton.config, self.runner.layers),
            task=task,
            masks_separate=self.masks_separate,
            parameters=[each.parameters for each in cut],
            has_other_parts=self.has_other_parts,
            lookup=self.lookup,
        )


def _stack_in(skeleton: PreTrainedModel, owner: nn.Module) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """One of two stacks: the module that takes tokens, and its layers. Raises BadInput."""
    found = _largest(_nearest_lists(owner))
    if found is None or "input_ids" not in inspect.signature(owner.forward).parameters:
        raise BadInput(f"{type(skeleton).__name__}: its {type(owner).__name__} is no list of layers that takes tokens")
    return owner, tuple(found[1])


def _input_and_output(skeleton: PreTrainedModel, *, has_output: bool) -> tuple[nn.Module, nn.Module | None]:
    try:
        embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        embedding, head = None, None
    # PEFT's module around one whose rows of some tokens are trained reads its matrix as the one within.
    embedding, head = (getattr(each, "original_module", each) for each in (embedding, head))
    for module, role in ((embedding, "input embedding"), *([(head, "output head")] if has_output else [])):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            raise BadInput(f"{type(skeleton).__name__} has no {role}; only language models can be fine-tuned")
    assert embedding is not None
    return embedding, head if has_output else None


def find_stack(skeleton: PreTrainedModel) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The owner and the layers of the language model: of the lists of layers that are nearest to the root of its
    decoder, the one with most parameters. The owner takes tokens; what calls the layers may be a part of it.

    A vision tower may have more parameters. It is next to the decoder, or deeper within it. What a model calls its
    decoder may be its head; then the model itself is the root.
    """
    lists = _nearest_lists(skeleton.get_decoder()) or _nearest_lists(skeleton)
    found = _largest(lists)
    owner = None if found is None else _embedding_owner(skeleton, found[0])
    if found is None or owner is None:
        raise BadInput(
            f"{type(skeleton).__name__} has no list of layers; its layers must be in one torch.nn.ModuleList, within a"
            " module that takes tokens and is not the whole model"
        )
    return owner, tuple(found[1])


def _embedding_owner(skeleton: nn.Module, caller: nn.Module) -> nn.Module | None:
    """The module around the layers that the whole model calls with tokens, `caller` or one around it, if that can be
    tried; else the innermost one that takes tokens. None if only the whole model does.

    The outermost one counts: it does all that the model does with tokens, such as masks that a part does not make.
    """
    names = {module: name for name, module in skeleton.named_modules()}
    path = names[caller].split(".") if names[caller] else []
    around = [skeleton.get_submodule(".".join(path[:depth])) for depth in range(len(path), 0, -1)]
    candidates = [each for each in around if "input_ids" in inspect.signature(each.forward).parameters]
    called: list[nn.Module] = []

    def stop(module: nn.Module, arguments: tuple[object, ...], keywords: dict[str, object]) -> None:
        if any(isinstance(each, torch.Tensor) for each in (*arguments[:1], keywords.get("input_ids"))):
            called.append(module)
            raise RuntimeError("found")

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for each in candidates:
            hooks.callback(each.register_forward_pre_hook(stop, with_kwargs=True).remove)
        with contextlib.suppress(*CANNOT_RUN):
            skeleton(input_ids=torch.zeros((1, SAMPLE_TOKENS), dtype=torch.long), use_cache=False)
    return next(iter(called or candidates), None)


def _largest(lists: Sequence[tuple[nn.Module, nn.ModuleList]]) -> tuple[nn.Module, nn.ModuleList] | None:
    """The list of layers with most parameters, and the module that has it; None if there is none."""
    return max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()), default=None)


def _nearest_lists(root: nn.Module) -> list[tuple[nn.Module, nn.ModuleList]]:
    """The lists of modules that are nearest to the root, each with the module that has it."""
    modules, lists = [root], list[tuple[nn.Module, nn.ModuleList]]()
    while modules and not lists:
        children = [(module, child) for module in modules for child in module.children()]
        lists = [(module, child) for module, child in children if isinstance(child, nn.ModuleList) and len(child)]
        modules = [child for _, child in children]
    return lists


def _placed_parameters(
    skeleton: nn.Module, layers: Sequence[nn.Module]
) -> tuple[list[PlacedParameter], list[list[PlacedParameter]]]:
    """The parameters outside the layers, and those of each layer, in the order of the module tree. What several layers
    share is given for each of them."""
    outside: list[PlacedParameter] = []
    inside: list[list[PlacedParameter]] = [[] for _ in layers]
    for placed, homes in placed_parameters(skeleton, layers):
        other = next((name for name, found in homes.items() if bool(found) != bool(homes[placed.name])), None)
        if other is not None:
            raise BadInput(
                f"{other} and {placed.name} are one tensor, in a layer and outside of the layers; such models cannot be"
                " streamed"
            )
        own_layers = set[int]().union(*homes.values())
        for layer in own_layers:
            inside[layer].append(placed)
        if not own_layers:
            outside.append(replace(placed, unbound=placeholder(placed.without_values())))
    return outside, inside


def _split(
    used: Sequence[PlacedParameter], usage: Usage, embedding: PlacedParameter, *, tied: bool
) -> tuple[list[PlacedParameter], list[PlacedParameter]]:
    """The parameters before the layers, the embedding's weight first, and those after the layers."""
    for parameter in used:
        is_both = tied and (parameter is embedding or is_of_tokens(parameter.name))
        if parameter.name in usage.before & usage.after and not is_both:
            raise BadInput(
                f"{parameter.name} is used both before and after the layers; only a tied embedding may be used twice"
            )
    before = [embedding, *(each for each in used if each.name in usage.before and each is not embedding)]
    return before, [each for each in used if each not in before]


def _layer_traits(config: PretrainedConfig, layers: Sequence[nn.Module]) -> LayerTraits:
    """The traits of a model's layers. What the configuration does not give counts as absent."""
    text = config.get_text_config()
    values = text.to_dict()  # attributes raise where they differ from layer to layer

    def number(name: str) -> int:
        value = values.get(text.attribute_map.get(name, name))
        return value if isinstance(value, int) else 0

    num_heads = number("num_attention_heads")
    return LayerTraits(
        num_heads=num_heads,
        head_dim=number("head_dim") or number("hidden_size") // max(1, num_heads),
        active_experts=max(1, number("num_experts_per_tok")),
        inputs_first=tuple(sorted({name for layer in layers for name in _inputs_first(layer)})),
    )


def _inputs_first(layer: nn.Module) -> list[str]:
    """Names of the layer's matrices `[inputs, outputs]`, as in GPT-2's linear layer and some stacks of experts."""
    return [
        f"{module_name}.{name}"
        for module_name, module in layer.named_modules()
        if isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
        for name, parameter in module.named_parameters(recurse=False)
        if is_matrix(f"{module_name}.{name}", parameter.dim())
    ]
