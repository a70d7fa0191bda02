"""Finds the blocks of any Hugging Face decoder, and binds weights to one block at a time.

1. `find_blocks` turns a skeleton into a `DecoderModel`. It finds the embedding, the list of layers, and the parameters
   before and after the layers (`probe` runs the model to learn these), and lays out the `ModelSpec`.
2. `bind` gives a block its weights. Then the block can run. The embedding can be given some rows of its matrix alone.
3. `release` takes the weights away again.

Invariant: an unbound parameter takes no memory. In the layers it is a meta parameter, so that using it by mistake
fails. Outside the layers it is a placeholder (one zero, expanded), because the owner's code also runs through the part
whose result is not needed.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ratel_cli.data.packing import MicroBatch
from ratel_cli.errors import BadInput
from ratel_cli.model.around_layers import reject_other_text, reject_what_passes_all_layers
from ratel_cli.model.carried import Embedded, LayerCall, LayerOutput
from ratel_cli.model.layer_runner import CANNOT_RUN, LayerRunner, last_hidden_state, loss_sum
from ratel_cli.model.probe import SAMPLE_TOKENS, Usage, probe_usage, separates_samples
from ratel_cli.model.row_lengths import row_multiple
from ratel_cli.model.row_lookup import DistinctTokens, RowLookup
from ratel_cli.model.skeleton import NAMES_OF_DTYPES
from ratel_cli.model.spec import ROTARY_BYTES, TOKEN_BYTES, LayerTraits, ModelSpec, decays, is_matrix
from ratel_cli.model.trials import Trial, carried_bytes, counts_positions_from_zero
from ratel_cli.schedule.blocks import BlockSpec, ParameterSpec, lay_out_block
from ratel_cli.schedule.rules import ADAMW, FROZEN, Rule
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import VALUE_BYTES, DtypeName


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModuleAttribute:
    """An attribute of a module that holds a parameter: one place in the module tree."""

    module: nn.Module
    attribute: str

    def put(self, parameter: nn.Parameter) -> None:
        # Assigning through _parameters costs 1 us; setattr on a module costs 20.
        self.module._parameters[self.attribute] = parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacedParameter:
    """One parameter and its places in the module tree."""

    name: str
    places: tuple[_ModuleAttribute, ...]
    unbound: nn.Parameter
    """What stands in its places while no weights are bound."""
    decay: bool
    """Whether weight decay applies."""
    is_trained: bool
    """False if the model's own code has frozen it."""

    @property
    def dtype(self) -> DtypeName:
        """What it computes in."""
        return NAMES_OF_DTYPES[self.unbound.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.unbound.shape)

    def put(self, parameter: nn.Parameter) -> None:
        """Put a parameter into its places."""
        for place in self.places:
            place.put(parameter)

    def unbind(self) -> None:
        """Put the unbound parameter into every place."""
        self.put(self.unbound)


@dataclass(frozen=True, slots=True)
class FinishedTokens:
    """Hidden states of one micro-batch behind the final norm, for the head and the loss."""

    layer_runner: LayerRunner
    result: object
    """What the owner returned."""
    targets: torch.Tensor
    """`[batch, tokens]`."""

    @property
    def hidden(self) -> torch.Tensor:
        """`[batch, tokens, hidden_size]`."""
        return last_hidden_state(self.result)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, tokens, vocabulary]` of a part of `hidden`, `[rows, tokens, hidden_size]`."""
        return self.layer_runner.logits(self.result, hidden)

    def loss_sum(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of the cross-entropies of the tokens from `first` on, counted row by row, whose hidden states are
        `[1, tokens, hidden_size]`; an fp32 scalar."""
        return loss_sum(self.outputs(hidden), self.targets.reshape(-1)[first : first + hidden.shape[1]])


class DecoderModel:
    """A skeleton whose blocks are known. Bind those of one segment at a time."""

    def __init__(
        self,
        *,
        skeleton: PreTrainedModel,
        layer_runner: LayerRunner,
        spec: ModelSpec,
        traits: LayerTraits,
        masks_separate: bool,
        parameters: Sequence[tuple[_PlacedParameter, ...]],
        has_other_parts: bool,
        lookup: RowLookup,
    ) -> None:
        self.skeleton = skeleton
        self.layer_runner = layer_runner
        self.spec = spec
        self.has_other_parts = has_other_parts
        """Whether the skeleton has parameters that text does not use, such as a vision tower's. They are not trained,
        and no block has them."""
        self.traits = traits
        self.parameter_names = tuple(name for name, _ in skeleton.named_parameters())
        """All parameters, in the order of torch's `named_parameters`."""
        self._parameters = tuple(parameters)
        """The parameters of each block, in the order of `spec`."""
        self._masks_separate = masks_separate
        self._lookup = lookup
        self._device = torch.device("cpu")

    @cached_property
    def packs(self) -> bool:
        """Whether samples that are packed into one sequence stay apart. Found by numbers when it is first asked, which
        takes seconds for a large model; then the model must be on the CPU, with no block bound."""
        if not self._masks_separate:
            return False
        return self._trial.samples_stay_apart()

    @cached_property
    def looks_ahead(self) -> bool:
        """Whether a token's result depends on tokens behind it. As `packs`, found when asked."""
        return self._trial.looks_ahead()

    @cached_property
    def row_multiple(self) -> int:
        """The number that must divide the tokens of a row; 1 for nearly all models. As `packs`, found when asked."""
        trial = self._trial
        return row_multiple(trial.layer_runner, trial.outside, trial.layers, num_positions=trial.num_positions)

    @property
    def _trial(self) -> Trial:
        assert self._device.type == "cpu"
        before, *layers, after = (
            [each for block in segment.bound for each in self._parameters[block.index]]
            for segment in self.spec.segments
        )
        number = getattr(self.skeleton.config.get_text_config(), "max_position_embeddings", None)
        return Trial(
            layer_runner=self.layer_runner,
            outside=tuple({each.name: each for each in (*before, *after)}.values()),
            layers=layers,
            vocab_size=self.spec.vocab_size,
            num_positions=number if isinstance(number, int) else None,
        )

    def place(self, device: torch.device) -> None:
        """Move buffers and placeholders to the device that computes. Weights are where their caller binds them."""
        if device == self._device:
            return
        self._device = device
        for module in self.skeleton.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        placed = list(self._parameters)
        for block in (*self.spec.embedding.blocks, *self.spec.head.blocks):
            placed[block.index] = tuple(
                replace(each, unbound=_placeholder(each.unbound, device)) for each in placed[block.index]
            )
            for parameter in placed[block.index]:
                parameter.unbind()
        self._parameters = tuple(placed)

    def train(self, mode: bool) -> bool:
        """Whether dropout is on from now on. Returns whether it was before."""
        before = self.skeleton.training
        self.skeleton.train(mode)
        return before

    def sample(self, num_tokens: int) -> MicroBatch:
        """A micro-batch of one row with two samples, all of token 0, every one of them a target."""
        first = num_tokens // 2
        positions = torch.cat([torch.arange(first), torch.arange(num_tokens - first)]).unsqueeze(0)
        tokens = torch.zeros_like(positions)
        return replace(MicroBatch.of_tokens(tokens, positions), targets=tokens, num_targets=num_tokens)

    def looked_up(self, batch: MicroBatch) -> torch.Tensor:
        """The tokens `[batch, tokens]` that the embedding looks up."""
        return batch.input_ids

    def begin(self, batch: MicroBatch) -> Embedded:
        """The first hidden states and every layer's arguments. Raises BadInput."""
        return self.layer_runner.embed(batch.input_ids, batch.position_ids)

    def run(self, index: int, hidden: torch.Tensor, call: LayerCall) -> LayerOutput:
        """The output of a decoder layer, counted from 0, and what it returns besides for later layers."""
        return self.layer_runner.run_layer(index, hidden, call)

    def finish(self, hidden: torch.Tensor, batch: MicroBatch) -> FinishedTokens:
        """The last layer's output `[batch, tokens, hidden_size]` behind the final norm. Raises BadInput."""
        finished = self.layer_runner.finish(hidden, batch.input_ids, batch.position_ids)
        return FinishedTokens(self.layer_runner, finished, batch.targets)

    def module(self, index: int) -> nn.Module:
        """A decoder layer, counted from 0."""
        return self.layer_runner.layers[index]

    def bind(
        self, block: BlockSpec, *parts: torch.Tensor, tokens: DistinctTokens | None = None
    ) -> tuple[nn.Parameter, ...]:
        """Put views of the block's flat array into its modules. `parts` are that array, `[block.num_elements]` in all;
        each begins where a parameter begins.

        `tokens` are for an embedding whose matrix has the rows of these tokens alone: they are the first part, and the
        others begin with the second parameter.
        Returns the views, each in its parameter's shape, in the order of `block.parameters`.
        """
        starts = list(accumulate(map(len, parts), initial=0))
        if tokens is not None:
            ends = [*(parameter.start for parameter in block.parameters[1:2]), block.num_elements]
            starts = [0, *accumulate(map(len, parts[1:]), initial=ends[0])]
        assert starts[-1] == block.num_elements

        def view(parameter: ParameterSpec, shape: tuple[int, ...]) -> torch.Tensor:
            number = min(bisect_right(starts, parameter.start), len(parts)) - 1
            start = parameter.start - starts[number]
            return parts[number][start : start + math.prod(shape)].view(shape)

        shapes = [parameter.shape for parameter in block.parameters]
        if tokens is not None:
            shapes[0] = (len(tokens), *shapes[0][1:])
            self._lookup.bind(tokens)
        parameters = tuple(
            nn.Parameter(view(parameter, shape), requires_grad=block.is_trained)
            for parameter, shape in zip(block.parameters, shapes, strict=True)
        )
        for placed, parameter in zip(self._parameters[block.index], parameters, strict=True):
            placed.put(parameter)
        return parameters

    def release(self, segment: Segment) -> None:
        """Put the unbound parameters back. Afterwards the model has no reference to the bound weights."""
        for block in segment.bound:
            for parameter in self._parameters[block.index]:
                parameter.unbind()
        if segment.index == 0:
            self._lookup.unbind()


def find_blocks(skeleton: PreTrainedModel, *, name: str, gradient_dtype: DtypeName | None = None) -> DecoderModel:
    """Find embedding, layers and head in `skeleton`. Raises BadInput if the model cannot be streamed.

    `name` is the model's name in its spec. `gradient_dtype`: in which gradients leave the device; None: in the model's
    own dtype. The skeleton is changed: its parameters become unbound ones.
    """
    embedding, head = _input_and_output(skeleton)
    owner, layers = find_stack(skeleton)
    tied = head.weight is embedding.weight
    outside, inside = _placed_parameters(skeleton, layers)
    for parameter in outside:
        parameter.unbind()
    layer_runner = LayerRunner(skeleton, owner, layers)
    first = next(each for each in outside if each.unbound is embedding.weight)
    lookup = RowLookup(embedding)
    usage, embedded = probe_usage(layer_runner, {each.name: each.unbound for each in outside}, first.name, lookup)
    used = [each for each in outside if each is first or each.name in usage.before | usage.after]
    unused = [each for each in outside if each not in used]
    for parameter in unused:
        parameter.put(nn.Parameter(parameter.unbound.to("meta"), requires_grad=False))  # code that reads it fails
    reject_what_passes_all_layers(layer_runner, used, vocab_size=first.shape[0])
    before, after = _split(used, usage, first, tied=tied)
    if layer_runner.takes_positions:
        layer_runner.takes_positions = counts_positions_from_zero(layer_runner, used, vocab_size=first.shape[0])
    reject_other_text(layer_runner, used, vocab_size=first.shape[0], has_other_parts=bool(unused))
    found = [
        ("embedding", before),
        *((f"layer {index}", parameters) for index, parameters in enumerate(inside)),
        ("head", [*after, *(before[:1] if tied else [])]),
    ]
    dtype = NAMES_OF_DTYPES[cast(torch.dtype, skeleton.config.dtype)]
    cut = _cut_into_blocks(found, dtype)
    spec = ModelSpec(
        name=name,
        architecture=type(skeleton).__name__,
        blocks=tuple(
            lay_out_block(
                index=index,
                segment=each.segment,
                name=each.name,
                parameters=[(placed.name, placed.shape, placed.decay) for placed in each.parameters],
                dtype=each.dtype,
                gradient_dtype=gradient_dtype if each.dtype == dtype else None,
                rule=each.rule,
                borrowers=each.borrowers,
                is_looked_up=first in each.parameters,
            )
            for index, each in enumerate(cut)
        ),
        segment_names=tuple(name for name, _ in found),
        dtype=dtype,
        hidden_size=embedded.hidden.numel() // SAMPLE_TOKENS,
        vocab_size=first.shape[0],
        carried_bytes=carried_bytes(
            layer_runner,
            embedded,
            used,
            inside,
            vocab_size=first.shape[0],
            num_probed=SAMPLE_TOKENS,
            value_bytes=VALUE_BYTES[dtype],
        ),
        # Tables are there where no parameters give positions.
        batch_bytes=TOKEN_BYTES + (ROTARY_BYTES if sum(len(each.shape) > 1 for each in before) == 1 else 0),
        looks_up_rows=usage.looks_up_rows,
        substitutes=usage.substitutes,
    )
    return DecoderModel(
        skeleton=skeleton,
        layer_runner=layer_runner,
        spec=spec,
        traits=_layer_traits(skeleton.config, layers),
        masks_separate=layer_runner.takes_positions and separates_samples(embedded.calls),
        parameters=[each.parameters for each in cut],
        has_other_parts=bool(unused),
        lookup=lookup,
    )


class _CutBlock(NamedTuple):
    segment: int
    name: str
    dtype: DtypeName
    rule: Rule
    borrowers: tuple[int, ...]
    parameters: tuple[_PlacedParameter, ...]


def _cut_into_blocks(segments: Sequence[tuple[str, Sequence[_PlacedParameter]]], dtype: DtypeName) -> list[_CutBlock]:
    """The blocks of segments, given as (name, parameters): of each segment first what is trained in the model's
    dtype; behind all of these what is in another one, or frozen, or borrowed by other segments.

    A parameter that several segments have is given for each of them, and belongs to the first. Blocks that are alike
    lie one after another then, and the store's manifest describes them together.
    """
    users = defaultdict[str, list[int]](list)
    for index, (_, parameters) in enumerate(segments):
        for each in parameters:
            users[each.name].append(index)
    firsts, others = list[_CutBlock](), list[_CutBlock]()
    for index, (name, parameters) in enumerate(segments):
        of_segment = [each for each in parameters if users[each.name][0] == index]
        kinds = [(each.dtype, ADAMW if each.is_trained else FROZEN, tuple(users[each.name][1:])) for each in of_segment]
        own = (dtype, ADAMW, ()) if index else kinds[0]  # an embedding's begins with the matrix
        for of_block in dict.fromkeys(kinds):
            chosen = tuple(each for each, found in zip(of_segment, kinds, strict=True) if found == of_block)
            if of_block == own:
                firsts.append(_CutBlock(index, name, *own, chosen))
            else:
                what = f"{name}, {'frozen' if of_block[1] is FROZEN else 'in'} {of_block[0]}"
                shared = ", shared" if of_block[2] else ", not shared" if own[2] else ""
                others.append(_CutBlock(index, what + shared, *of_block, chosen))
    return [*firsts, *others]


def _input_and_output(skeleton: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    try:
        embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        embedding, head = None, None
    for module, role in ((embedding, "input embedding"), (head, "output head")):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or (module is embedding and not weight.requires_grad):
            raise BadInput(f"{type(skeleton).__name__} has no {role}; only causal language models can be fine-tuned")
    assert embedding is not None and head is not None
    return embedding, head


def find_stack(skeleton: PreTrainedModel) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The owner and the layers of the language model: of the lists of layers that are nearest to the root of its
    decoder, the one with most parameters. The owner takes tokens; what calls the layers may be a part of it.

    A vision tower may have more parameters. It is next to the decoder, or deeper within it. What a model calls its
    decoder may be its head; then the model itself is the root.
    """
    lists = _nearest_lists(skeleton.get_decoder()) or _nearest_lists(skeleton)
    found = max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()), default=None)
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
) -> tuple[list[_PlacedParameter], list[list[_PlacedParameter]]]:
    """The parameters outside the layers, and those of each layer, in the order of the module tree. What several layers
    share is given for each of them."""
    layers_of = defaultdict[int, list[int]](list)
    for index, layer in enumerate(layers):
        for module in layer.modules():
            layers_of[id(module)].append(index)
    places: dict[nn.Parameter, list[_ModuleAttribute]] = {}
    names: dict[nn.Parameter, str] = {}
    homes = defaultdict[nn.Parameter, set[int]](set)
    for module_name, module in skeleton.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, own_layers = f"{module_name}.{attribute}".lstrip("."), layers_of[id(module)]
            if names.setdefault(parameter, name) != name and bool(own_layers) != bool(homes[parameter]):
                raise BadInput(
                    f"{name} and {names[parameter]} are one tensor, in a layer and outside of the layers; such models"
                    " cannot be streamed"
                )
            homes[parameter].update(own_layers)
            places.setdefault(parameter, []).append(_ModuleAttribute(module=module, attribute=attribute))
    norms = [module for module in skeleton.modules() if isinstance(module, nn.LayerNorm)]
    in_norms = {id(parameter) for norm in norms for parameter in norm.parameters()}
    outside: list[_PlacedParameter] = []
    inside: list[list[_PlacedParameter]] = [[] for _ in layers]
    for parameter, name in names.items():
        own_layers = sorted(homes[parameter])
        unbound = parameter if own_layers else _placeholder(parameter)
        decay = decays(name, is_in_layer_norm=id(parameter) in in_norms)
        placed = _PlacedParameter(
            name=name,
            places=tuple(places[parameter]),
            unbound=unbound,
            decay=decay,
            is_trained=parameter.requires_grad,
        )
        for parameters in (inside[layer] for layer in own_layers) if own_layers else (outside,):
            parameters.append(placed)
    return outside, inside


def _split(
    used: Sequence[_PlacedParameter], usage: Usage, embedding: _PlacedParameter, *, tied: bool
) -> tuple[list[_PlacedParameter], list[_PlacedParameter]]:
    """The parameters before the layers, the embedding's weight first, and those after the layers."""
    for parameter in used:
        if parameter.name in usage.before & usage.after and not (tied and parameter is embedding):
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


def _placeholder(parameter: nn.Parameter, device: torch.device | None = None) -> nn.Parameter:
    """A parameter of zeros with the same shape, in the memory of one element."""
    zero = torch.zeros((), dtype=parameter.dtype, device=device)
    return nn.Parameter(zero.expand(parameter.shape), requires_grad=False)
