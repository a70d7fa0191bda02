"""Finds the blocks of any Hugging Face decoder and binds weights to one of them at a time.

`find_blocks` turns a skeleton into a `DecoderModel`: which module is the embedding, which list holds
the layers, which parameters belong before and after them (`model.probe` tries it out), and what the
`ModelSpec` of it all is. The engine then calls `bind`, drives the block, and calls `release`.

Invariant: an unbound parameter costs no memory. Layers rest on the meta device, so that using one by
mistake fails; parameters outside the layers rest on placeholders (one zero, expanded), so that the
owner's code can run through the half of itself that is not wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ratel_cli.errors import BadInput
from ratel_cli.model.layer_runner import LayerRunner
from ratel_cli.model.probe import Usage, keeps_samples_apart, probe_usage
from ratel_cli.model.spec import BlockKind, BlockSpec, LayerTraits, ModelSpec, decays, lay_out_block
from ratel_cli.model.traits import layer_traits


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place in the module tree that holds a parameter."""

    module: nn.Module
    attribute: str

    def put(self, parameter: nn.Parameter) -> None:
        # Assigning through _parameters costs 1 us; setattr on a module costs 20.
        self.module._parameters[self.attribute] = parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """One parameter, everywhere it sits (its home first; a tied embedding sits in the head too), and its rest."""

    name: str
    slots: tuple[_Slot, ...]
    resting: nn.Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.resting.shape)

    def rest(self) -> None:
        """Put the resting parameter everywhere."""
        for slot in self.slots:
            slot.put(self.resting)


class DecoderModel:
    """A skeleton whose blocks are known. Binding is exclusive: one block at a time, and the embedding with the head."""

    def __init__(
        self,
        *,
        skeleton: PreTrainedModel,
        layer_runner: LayerRunner,
        spec: ModelSpec,
        traits: LayerTraits,
        packs: bool,
        tensors: Sequence[tuple[_Tensor, ...]],
    ) -> None:
        self.skeleton = skeleton
        self.layer_runner = layer_runner
        self.spec = spec
        self.traits = traits
        self.packs = packs
        """Whether samples packed into one row stay apart in every layer's attention."""
        self.parameter_names = tuple(name for name, _ in skeleton.named_parameters())
        """Trainable tensors in the order in which torch would list them."""
        self._tensors = tuple(tensors)
        self._device = torch.device("cpu")

    def place(self, device: torch.device) -> None:
        """Take to the device that will compute what is no weight: buffers, and what rests outside the layers."""
        if device == self._device:
            return
        self._device = device
        for module in self.skeleton.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
        before, *layers, after = self._tensors
        outside = [
            tuple(replace(tensor, resting=_placeholder(tensor.resting, device)) for tensor in tensors)
            for tensors in (before, after)
        ]
        self._tensors = (outside[0], *layers, outside[1])
        for tensor in (*outside[0], *outside[1]):
            tensor.rest()

    def bind(self, block: BlockSpec, weights: torch.Tensor) -> tuple[nn.Parameter, ...]:
        """Put views of the flat array `weights` [block.num_elements] into the block's modules.

        Returns them in the order of `block.parameters`; autograd.grad takes them as they are.
        """
        parameters = tuple(
            nn.Parameter(weights[parameter.start : parameter.stop].view(parameter.shape))
            for parameter in block.parameters
        )
        for tensor, parameter in zip(self._tensors[block.index], parameters, strict=True):
            tensor.slots[0].put(parameter)
        return parameters

    def tie(self, embedding: Sequence[nn.Parameter]) -> nn.Parameter:
        """Put the bound embedding weight into the head as well. Returns it."""
        for slot in self._tensors[0][0].slots[1:]:
            slot.put(embedding[0])
        return embedding[0]

    def release(self, block: BlockSpec) -> None:
        """Put the resting parameters back; afterwards nothing refers to the bound weights."""
        for tensor in self._tensors[block.index]:
            tensor.rest()


def find_blocks(skeleton: PreTrainedModel, *, name: str) -> DecoderModel:
    """Locate embedding, layers and head in `skeleton`. Raises BadInput for models that cannot be streamed."""
    embedding, head = _input_and_output(skeleton)
    owner, layers = _stack(skeleton)
    tied = head.weight is embedding.weight
    outside, inside = _tensors(skeleton, layers)
    for tensor in outside:
        tensor.rest()
    layer_runner = LayerRunner(skeleton, owner, layers)
    usage, embedded = probe_usage(layer_runner, {tensor.name: tensor.resting for tensor in outside})
    first = next(tensor for tensor in outside if tensor.resting is embedding.weight)
    before, after = _split(outside, usage, first, tied=tied)
    groups: list[tuple[BlockKind, str, list[_Tensor]]] = [
        ("embedding", "embedding", before),
        *(("layer", f"layer {index}", tensors) for index, tensors in enumerate(inside)),
        ("head", "head", after),
    ]
    spec = ModelSpec(
        name=name,
        architecture=type(skeleton).__name__,
        blocks=tuple(
            lay_out_block(
                index=index,
                kind=kind,
                name=block_name,
                parameters=[(tensor.name, tensor.shape, decays(tensor.name, len(tensor.shape))) for tensor in tensors],
            )
            for index, (kind, block_name, tensors) in enumerate(groups)
        ),
        tied=tied,
        hidden_size=embedded.hidden.shape[-1],
        vocab_size=first.shape[0],
    )
    return DecoderModel(
        skeleton=skeleton,
        layer_runner=layer_runner,
        spec=spec,
        traits=layer_traits(skeleton.config, layers),
        packs=layer_runner.takes_positions and keeps_samples_apart(embedded.calls),
        tensors=[tuple(tensors) for _, _, tensors in groups],
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


def _stack(skeleton: nn.Module) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The list of layers is the ModuleList with most parameters; its owner is the module that holds it."""
    best: tuple[int, nn.Module, nn.ModuleList] | None = None
    for module in skeleton.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) > 0:
                size = sum(parameter.numel() for parameter in child.parameters())
                if best is None or size > best[0]:
                    best = (size, module, child)
    if best is None:
        raise BadInput(f"{type(skeleton).__name__} has no list of layers")
    return best[1], tuple(best[2])


def _tensors(skeleton: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[_Tensor], list[list[_Tensor]]]:
    """Every parameter outside the layers, and those of each layer, in the order of the module tree."""
    layer_of = {id(module): index for index, layer in enumerate(layers) for module in layer.modules()}
    slots: dict[nn.Parameter, list[_Slot]] = {}
    names: dict[nn.Parameter, str] = {}
    homes: dict[nn.Parameter, int | None] = {}
    for module_name, module in skeleton.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            if not parameter.requires_grad:
                raise BadInput(f"{module_name}.{attribute} is not trained by the model's own code; that is unsupported")
            name, home = f"{module_name}.{attribute}".lstrip("."), layer_of.get(id(module))
            if homes.setdefault(parameter, home) != home:
                raise BadInput(
                    f"{name} and {names[parameter]} are one tensor; layers that share weights are unsupported"
                )
            names.setdefault(parameter, name)
            slots.setdefault(parameter, []).append(_Slot(module, attribute))
    outside: list[_Tensor] = []
    inside: list[list[_Tensor]] = [[] for _ in layers]
    for parameter, name in names.items():
        home = homes[parameter]
        if home is None:
            outside.append(_Tensor(name=name, slots=tuple(slots[parameter]), resting=_placeholder(parameter)))
        else:
            inside[home].append(_Tensor(name=name, slots=tuple(slots[parameter]), resting=parameter))
    return outside, inside


def _split(
    outside: Sequence[_Tensor], usage: Usage, embedding: _Tensor, *, tied: bool
) -> tuple[list[_Tensor], list[_Tensor]]:
    """The tensors before and after the layers, the embedding's weight first."""
    for tensor in outside:
        if tensor.name in usage.before & usage.after and not (tied and tensor is embedding):
            raise BadInput(f"{tensor.name} is used both before and after the layers; only a tied embedding may be")
    before = [embedding, *(t for t in outside if t.name in usage.before and t is not embedding)]
    return before, [tensor for tensor in outside if tensor not in before]


def _placeholder(parameter: nn.Parameter, device: torch.device | None = None) -> nn.Parameter:
    """A parameter of the same shape that takes the memory of one element."""
    zero = torch.zeros((), dtype=parameter.dtype, device=device)
    return nn.Parameter(zero.expand(parameter.shape), requires_grad=False)
