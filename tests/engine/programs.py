"""A model that is no decoder, whole and cut into a program: no embedding, no head, a matrix that segments share, two
streams that are carried, and segments without parameters of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import torch
from torch import nn
from torch.nn.functional import gelu
from transformers import PretrainedConfig

from ratel_cli.model.files.skeleton import DTYPES, NAMES_OF_DTYPES
from ratel_cli.model.values.carried import Embedded, LayerCall, LayerOutput
from ratel_cli.model.values.row_lookup import DistinctTokens
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.schedule.blocks import BlockSpec, lay_out_block
from ratel_cli.schedule.segments import Segment
from tests.engine.exactness import OpenMachine, assert_same_training
from tests.engine.machine import Machine
from tests.reference import Recipe, Trained, train_module

NUM_LAYERS = 4
SHARED_BY = (1, 3, 5)
"""Segments that use the shared matrix: layers 0 and 2, and the last one."""
First = Literal["own", "shared", "none"]
"""The parameters before the layers, which make the stream: of their own, those of the shared matrix, or none."""


class _Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(gelu(self.up(hidden)))
        return made


class Net(nn.Module):
    """Residual layers on features, conditioned by a stream. Layer 0 leaves a second stream for layers 2 and 3."""

    def __init__(self, width: int, *, first: First) -> None:
        super().__init__()
        self.first = first
        self.condition = nn.Linear(width, width) if first == "own" else None
        self.shared = nn.Linear(width, width)
        self.inner = nn.ModuleDict({str(index): _Inner(width) for index in (0, 1, 3)})

    def stream(self, condition: torch.Tensor) -> torch.Tensor:
        if self.first == "none":
            return condition
        return gelu((self.shared if self.condition is None else self.condition)(condition))

    def layer(
        self, index: int, hidden: torch.Tensor, stream: torch.Tensor, left: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        if index == 0:
            left["made"] = self.inner["0"](hidden)
            return hidden + self.shared(gelu(left["made"]))
        if index == 1:
            return hidden + self.inner["1"](gelu(hidden)) * stream
        if index == 2:
            return hidden + self.shared(left["made"] * hidden)
        return hidden + self.inner["3"](gelu(hidden + stream)) * left["made"]

    def loss_sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (self.shared(hidden).float() - targets.float()).square().sum() / targets.shape[-1]

    def forward(self, batch: NetBatch) -> torch.Tensor:
        """The sum of the losses of all tokens."""
        hidden, stream, left = batch.features, self.stream(batch.condition), dict[str, torch.Tensor]()
        for index in range(NUM_LAYERS):
            hidden = self.layer(index, hidden, stream, left)
        return self.loss_sum(hidden, batch.targets)


@dataclass(frozen=True, slots=True)
class NetBatch:
    """Tensors `[rows, tokens, width]` in the compute dtype."""

    features: torch.Tensor
    condition: torch.Tensor
    targets: torch.Tensor

    @property
    def num_targets(self) -> int:
        return self.targets.shape[0] * self.targets.shape[1]

    def to(self, device: torch.device) -> Self:
        return replace(
            self,
            features=self.features.to(device),
            condition=self.condition.to(device),
            targets=self.targets.to(device),
        )


@dataclass(frozen=True, slots=True)
class _Finished:
    net: Net
    hidden: torch.Tensor
    targets: torch.Tensor
    compared: None = None

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net.shared(hidden)
        return made

    def loss_sum(self, hidden: torch.Tensor, first: int) -> torch.Tensor:
        targets = self.targets.reshape(1, -1, hidden.shape[-1])
        return self.net.loss_sum(hidden, targets[:, first : first + hidden.shape[1]])

    def num_right(self, hidden: torch.Tensor, first: int) -> None:
        return None


class NetProgram:
    """The net, cut at its layers. An unbound parameter has no values, so that using it fails."""

    def __init__(self, width: int, recipe: Recipe, *, first: First) -> None:
        self.net = Net(width, first=first).to(recipe.dtype)
        self.parameter_names = tuple(name for name, _ in self.net.named_parameters())
        self._unbound = {name: _unbound(name, each) for name, each in self.net.named_parameters()}
        self.spec = _spec_of(self.net, width, recipe)
        for segment in self.spec.segments:
            self.release(segment)

    traits = LayerTraits(num_heads=0, head_dim=0)

    def sample(self, num_tokens: int) -> NetBatch:
        shape, dtype = (1, num_tokens, self.spec.hidden_size), DTYPES[self.spec.dtype]
        return NetBatch(*(torch.zeros(shape, dtype=dtype) for _ in range(3)))

    def move_to(self, device: torch.device) -> None: ...

    def bind(
        self, block: BlockSpec, *parts: torch.Tensor, tokens: DistinctTokens | None = None
    ) -> tuple[nn.Parameter, ...]:
        assert tokens is None
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        found = [nn.Parameter(flat[each.start : each.stop].view(each.shape)) for each in block.parameters]
        for each, parameter in zip(block.parameters, found, strict=True):
            self._put(each.name, parameter)
        return tuple(found)

    def release(self, segment: Segment) -> None:
        for each in segment.parameters:
            self._put(each.name, self._unbound[each.name])

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        module, attribute = name.rsplit(".", 1)
        self.net.get_submodule(module)._parameters[attribute] = parameter

    def train(self, mode: bool) -> bool:
        before = self.net.training
        self.net.train(mode)
        return before

    def looked_up(self, batch: NetBatch) -> torch.Tensor:
        raise AssertionError("nothing is looked up")

    def begin(self, batch: NetBatch) -> Embedded:
        stream, left = self.net.stream(batch.condition), dict[object, object]()
        call = LayerCall(arguments=(stream, left), keywords={})  # type: ignore[arg-type]
        return Embedded(hidden=batch.features, calls=(call,) * NUM_LAYERS, extras=((),) * NUM_LAYERS)

    def run(self, index: int, hidden: torch.Tensor, call: LayerCall) -> LayerOutput:
        stream, left = call.arguments
        return self.net.layer(index, hidden, stream, left), ()  # type: ignore[arg-type]

    def finish(self, hidden: torch.Tensor, batch: NetBatch) -> _Finished:
        return _Finished(self.net, hidden, batch.targets)

    def module(self, index: int) -> nn.Module:
        return self.net


def _unbound(name: str, parameter: nn.Parameter) -> nn.Parameter:
    """In the layers one without values; outside of them zeros, with which a footprint runs."""
    if not name.startswith(("condition", "shared")):
        return nn.Parameter(parameter.to("meta"))
    return nn.Parameter(torch.zeros(()).to(parameter).expand(parameter.shape))


def _spec_of(net: Net, width: int, recipe: Recipe) -> ModelSpec:
    dtype = NAMES_OF_DTYPES[recipe.dtype]
    gradient_dtype = NAMES_OF_DTYPES[recipe.gradient_dtype or recipe.dtype]
    users = (0, *SHARED_BY) if net.first == "shared" else SHARED_BY
    own = [
        *([("first", 0, "condition")] if net.condition is not None else []),
        ("layer 0", 1, "inner.0"),
        ("layer 1", 2, "inner.1"),
        ("layer 3", 4, "inner.3"),
        ("shared", users[0], "shared"),
    ]
    return ModelSpec(
        name="net",
        architecture="Net",
        blocks=tuple(
            lay_out_block(
                index=index,
                segment=segment,
                name=name,
                parameters=[
                    (f"{module}.{each}", tuple(parameter.shape), each.endswith("weight"))
                    for each, parameter in net.get_submodule(module).named_parameters()
                ],
                dtype=dtype,
                gradient_dtype=gradient_dtype,
                borrowers=users[1:] if module == "shared" else (),
            )
            for index, (name, segment, module) in enumerate(own)
        ),
        segment_names=("first", *(f"layer {index}" for index in range(NUM_LAYERS)), "last"),
        dtype=dtype,
        hidden_size=width,
        vocab_size=width,
        carried_bytes=2 * width * recipe.dtype.itemsize,
        batch_bytes=3 * width * recipe.dtype.itemsize,
        loss_bytes=width * (recipe.dtype.itemsize + 3 * 4),
        looks_up_rows=False,
    )


@contextmanager
def opened_net(
    open_machine: OpenMachine, directory: Path, recipe: Recipe, *, width: int, first: First, **options: object
) -> Iterator[Machine]:
    """A machine with the net's program. Its steps are those of `net_steps`."""
    program = NetProgram(width, recipe, first=first)
    weights = net_weights(width, first=first)
    with open_machine(directory, PretrainedConfig(), recipe, weights=weights, model=program, **options) as ratel:
        yield ratel


def check_net(
    open_machine: OpenMachine,
    directory: Path,
    recipe: Recipe,
    *,
    num_micro_batches: int,
    first: First,
    width: int = 64,
    **options: object,
) -> None:
    """Train the net as a program and by its own forward: losses, norms and fp32 masters must be equal in every bit."""
    steps = net_steps(2, num_micro_batches, width, recipe.dtype)
    with opened_net(open_machine, directory, recipe, width=width, first=first, **options) as ratel:
        outcomes, weights = ratel.train(steps, recipe), ratel.weights()  # type: ignore[arg-type]
        assert all(outcome.applied for outcome in outcomes)
        wanted = net_trained(width, steps, recipe, first=first, device=ratel.device)
        assert_same_training(outcomes, weights, wanted)


def net_weights(width: int, *, first: First) -> dict[str, torch.Tensor]:
    """fp32 weights by name."""
    torch.manual_seed(1)
    return {name: each.detach() for name, each in Net(width, first=first).named_parameters()}


def net_steps(
    num_steps: int, num_micro_batches: int, width: int, dtype: torch.dtype, *, rows: int = 2, tokens: int = 12
) -> list[list[NetBatch]]:
    """Random features, conditions and targets."""
    generator = torch.Generator().manual_seed(num_steps)

    def batch() -> NetBatch:
        made = [torch.randn((rows, tokens, width), generator=generator).to(dtype) for _ in range(3)]
        return NetBatch(*made)

    return [[batch() for _ in range(num_micro_batches)] for _ in range(num_steps)]


def net_trained(
    width: int, steps: Sequence[Sequence[NetBatch]], recipe: Recipe, *, first: First, device: str = "cpu"
) -> Trained:
    """What the oracle makes of the weights, by the net's own forward."""
    recipe, weights = replace(recipe, device=device), net_weights(width, first=first)
    on_device = [[batch.to(torch.device(device)) for batch in batches] for batches in steps]
    net = Net(width, first=first)
    decayed = {name for name in weights if name.endswith("weight")}
    return train_module(net.to(recipe.dtype), net, weights, on_device, recipe, decayed=decayed)
