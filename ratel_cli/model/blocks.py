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

import inspect
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ratel_cli.errors import BadInput
from ratel_cli.model.kept_precision import reject_kept_parameters
from ratel_cli.model.layer_runner import LayerRunner
from ratel_cli.model.passed_on import reject_what_is_passed_on
from ratel_cli.model.probe import Usage, probe_usage, separates_samples
from ratel_cli.model.row_lengths import row_multiple
from ratel_cli.model.row_lookup import DistinctTokens, RowLookup
from ratel_cli.model.separation import samples_stay_apart
from ratel_cli.model.skeleton import NAMES_OF_DTYPES
from ratel_cli.model.spec import LayerTraits, ModelSpec, decays, is_matrix
from ratel_cli.schedule.blocks import BlockKind, BlockSpec, ParameterSpec, lay_out_block
from ratel_cli.sizes import DtypeName


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
    """One parameter and its places in the module tree. A tied embedding has two: the embedding first, then the head."""

    name: str
    places: tuple[_ModuleAttribute, ...]
    unbound: nn.Parameter
    """What stands in these places while no weights are bound."""
    decay: bool
    """Whether weight decay applies."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.unbound.shape)

    def put(self, parameter: nn.Parameter) -> None:
        """Put a parameter into the first place."""
        self.places[0].put(parameter)

    def unbind(self) -> None:
        """Put the unbound parameter into every place."""
        for place in self.places:
            place.put(self.unbound)


class DecoderModel:
    """A skeleton whose blocks are known. Bind one block at a time, or the embedding together with the head."""

    def __init__(
        self,
        *,
        skeleton: PreTrainedModel,
        layer_runner: LayerRunner,
        spec: ModelSpec,
        traits: LayerTraits,
        masks_separate: bool,
        parameters: Sequence[tuple[_PlacedParameter, ...]],
        lookup: RowLookup,
    ) -> None:
        self.skeleton = skeleton
        self.layer_runner = layer_runner
        self.spec = spec
        self.traits = traits
        self.measured_traits: LayerTraits | None = None
        """The traits with what `footprint` has measured, once it has."""
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
        assert self._device.type == "cpu"
        before, *layers, after = self._parameters
        return samples_stay_apart(
            self.layer_runner,
            (*before, *after),
            layers,
            vocab_size=self.spec.vocab_size,
            num_positions=self._num_positions,
        )

    @cached_property
    def row_multiple(self) -> int:
        """The number that must divide the tokens of a row; 1 for nearly all models. As `packs`, found when asked."""
        assert self._device.type == "cpu"
        before, *layers, after = self._parameters
        return row_multiple(self.layer_runner, (*before, *after), layers, num_positions=self._num_positions)

    @property
    def _num_positions(self) -> int | None:
        """The most tokens in a row, if the configuration says."""
        number = getattr(self.skeleton.config, "max_position_embeddings", None)
        return number if isinstance(number, int) else None

    def place(self, device: torch.device) -> None:
        """Move buffers and placeholders to the device that computes. Weights are where their caller binds them."""
        if device == self._device:
            return
        self._device = device
        for module in self.skeleton.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        before, *layers, after = self._parameters
        outside = [
            tuple(replace(each, unbound=_placeholder(each.unbound, device)) for each in parameters)
            for parameters in (before, after)
        ]
        self._parameters = (outside[0], *layers, outside[1])
        for parameter in (*outside[0], *outside[1]):
            parameter.unbind()

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
        parameters = tuple(map(nn.Parameter, map(view, block.parameters, shapes)))
        for placed, parameter in zip(self._parameters[block.index], parameters, strict=True):
            placed.put(parameter)
        return parameters

    def tie(self, embedding: Sequence[nn.Parameter]) -> nn.Parameter:
        """Put the bound weight of the embedding into the head as well, and return it.

        `embedding` is what `bind` returned for the embedding block.
        """
        for place in self._parameters[0][0].places[1:]:
            place.put(embedding[0])
        return embedding[0]

    def release(self, block: BlockSpec) -> None:
        """Put the unbound parameters back. Afterwards the model has no reference to the bound weights."""
        for parameter in self._parameters[block.index]:
            parameter.unbind()
        if block.kind == "embedding":
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
    reject_what_is_passed_on(layer_runner, outside, inside, vocab_size=first.shape[0])
    before, after = _split(outside, usage, first, tied=tied)
    found: list[tuple[BlockKind, str, list[_PlacedParameter]]] = [
        ("embedding", "embedding", before),
        *(("layer", f"layer {index}", parameters) for index, parameters in enumerate(inside)),
        ("head", "head", after),
    ]
    dtype = NAMES_OF_DTYPES[skeleton.dtype]
    spec = ModelSpec(
        name=name,
        architecture=type(skeleton).__name__,
        blocks=tuple(
            lay_out_block(
                index=index,
                kind=kind,
                name=block_name,
                parameters=[(each.name, each.shape, each.decay) for each in parameters],
                dtype=dtype,
                gradient_dtype=gradient_dtype,
            )
            for index, (kind, block_name, parameters) in enumerate(found)
        ),
        tied=tied,
        dtype=dtype,
        hidden_size=embedded.hidden.shape[-1],
        vocab_size=first.shape[0],
        looks_up_rows=usage.looks_up_rows,
    )
    reject_kept_parameters(skeleton)
    return DecoderModel(
        skeleton=skeleton,
        layer_runner=layer_runner,
        spec=spec,
        traits=_layer_traits(skeleton.config, layers),
        masks_separate=layer_runner.takes_positions and separates_samples(embedded.calls),
        parameters=[tuple(parameters) for _, _, parameters in found],
        lookup=lookup,
    )


def _input_and_output(skeleton: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    try:
        embedding, head = skeleton.get_input_embeddings(), skeleton.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        embedding, head = None, None
    for module, role in ((embedding, "input embedding"), (head, "output head")):
        if module is None or not isinstance(getattr(module, "weight", None), nn.Parameter):
            raise BadInput(f"{type(skeleton).__name__} has no {role}; only causal language models can be fine-tuned")
    assert embedding is not None and head is not None
    return embedding, head


def find_stack(skeleton: PreTrainedModel) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The owner and the layers of the language model: of the lists of layers that are nearest to the root of its
    decoder, the one with most parameters.

    A vision tower may have more parameters. It is next to the decoder, or deeper within it. What a model calls its
    decoder may be its head; then the model itself is the root.
    """
    lists = _nearest_lists(skeleton.get_decoder()) or _nearest_lists(skeleton)
    if not lists:
        raise BadInput(
            f"{type(skeleton).__name__} has no list of layers; its layers must be in one torch.nn.ModuleList"
        )
    owner, layers = max(lists, key=lambda each: sum(parameter.numel() for parameter in each[1].parameters()))
    if "input_ids" not in inspect.signature(owner.forward).parameters:
        raise BadInput(
            f"{type(skeleton).__name__}: its layers are called by {type(owner).__name__}, which receives hidden states;"
            " only models can be streamed whose layers are called by the module that embeds the tokens",
        )
    return owner, tuple(layers)


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
    """The parameters outside the layers, and those of each layer, in the order of the module tree."""
    layer_of = {id(module): index for index, layer in enumerate(layers) for module in layer.modules()}
    places: dict[nn.Parameter, list[_ModuleAttribute]] = {}
    names: dict[nn.Parameter, str] = {}
    homes: dict[nn.Parameter, int | None] = {}
    for module_name, module in skeleton.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            if not parameter.requires_grad:
                raise BadInput(
                    f"{module_name}.{attribute} is frozen by the model's own code; only models that"
                    " train every parameter are supported"
                )
            name, home = f"{module_name}.{attribute}".lstrip("."), layer_of.get(id(module))
            if homes.setdefault(parameter, home) != home:
                raise BadInput(
                    f"{name} and {names[parameter]} are one tensor; layers that share weights are not supported"
                )
            names.setdefault(parameter, name)
            places.setdefault(parameter, []).append(_ModuleAttribute(module=module, attribute=attribute))
    norms = [module for module in skeleton.modules() if isinstance(module, nn.LayerNorm)]
    in_norms = {id(parameter) for norm in norms for parameter in norm.parameters()}
    outside: list[_PlacedParameter] = []
    inside: list[list[_PlacedParameter]] = [[] for _ in layers]
    for parameter, name in names.items():
        home = homes[parameter]
        unbound = _placeholder(parameter) if home is None else parameter
        decay = decays(name, is_in_layer_norm=id(parameter) in in_norms)
        placed = _PlacedParameter(name=name, places=tuple(places[parameter]), unbound=unbound, decay=decay)
        (outside if home is None else inside[home]).append(placed)
    return outside, inside


def _split(
    outside: Sequence[_PlacedParameter], usage: Usage, embedding: _PlacedParameter, *, tied: bool
) -> tuple[list[_PlacedParameter], list[_PlacedParameter]]:
    """The parameters before the layers, the embedding's weight first, and those after the layers."""
    for parameter in outside:
        if parameter.name in usage.before & usage.after and not (tied and parameter is embedding):
            raise BadInput(
                f"{parameter.name} is used both before and after the layers; only a tied embedding may be used twice"
            )
    before = [embedding, *(each for each in outside if each.name in usage.before and each is not embedding)]
    return before, [each for each in outside if each not in before]


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
