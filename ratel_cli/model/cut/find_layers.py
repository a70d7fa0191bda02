"""Finds the layers of a module of any kind, and turns it into a `StackModel`.

The blocks are those that `ratel.hook` finds or is given. The module's own forward, run on an example, shows which
parameters outside of them are used before the layers and which behind them, or both by a layer and by the code around
it, as a diffusion transformer does with the embedding of its first block.

Invariant: a parameter that no code uses is frozen, as autograd has no gradient for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

import torch
from torch import nn

from ratel_cli.data.samples.sample_batch import SampleBatch
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.binding import PlacedParameter, cut_into_blocks, laid_out, placed_parameters
from ratel_cli.model.cut.cut_model import placeholder
from ratel_cli.model.cut.hooked import check_parameters, find_module_blocks, main_dtype
from ratel_cli.model.cut.layer_runner import LayerRunner
from ratel_cli.model.cut.probe import ModuleUsage, probe_module
from ratel_cli.model.cut.stack import SampleLoss, StackModel
from ratel_cli.model.cut.trials import carried_bytes
from ratel_cli.model.values.away import hooks_of
from ratel_cli.model.values.carried import tensors_of
from ratel_cli.model.values.spec import LayerTraits, ModelSpec, check_depth
from ratel_cli.schedule.rules import ALL_ADAMW, RuleChoice
from ratel_cli.sizes import VALUE_BYTES, DtypeName

_HIDDEN_COPIES = 8
"""Copies of the last hidden states that the code behind the layers makes, with their gradients: norms and products."""
_LOSS_BYTES = 12
"""Bytes for each element of the output: its value and its gradient in fp32, and what the loss makes of it."""

_NO_TRAITS = LayerTraits(num_heads=0, head_dim=0)


def find_layers(
    module: nn.Module,
    example: SampleBatch,
    *,
    blocks: str | Sequence[str] | None = None,
    name: str | None = None,
    gradient_dtype: DtypeName | None = None,
    traits: LayerTraits = _NO_TRAITS,
    loss: SampleLoss | None = None,
    rules: RuleChoice = ALL_ADAMW,
) -> StackModel:
    """Find the layers of `module`, which takes samples like those of `example`. Raises BadInput if it cannot be
    streamed.

    `blocks`: as `find_module_blocks` takes them. `name`: of the model; None: its class. `gradient_dtype`: in which
    gradients leave the device; None: in each block's own. `traits`: what the shapes of parameters do not show. `loss`:
    the model's own. `rules`: how what is trained is updated. The module is changed: its parameters become unbound ones,
    and its layers run one at a time.
    """
    layers = find_module_blocks(module, blocks)
    check_depth(len(layers))
    placed, layers_of = list[PlacedParameter](), dict[str, list[int]]()
    for found, homes in placed_parameters(module, list(layers.values())):
        if hooks_of(found.unbound):
            raise BadInput(
                f"{found.name} has a hook, which would get the gradient of one micro-batch at a time",
                "remove it, or train the module with ratel.hook",
            )
        placed.append(replace(found, unbound=placeholder(found.unbound)))
        layers_of[found.name] = sorted(set[int]().union(*homes.values()))
    check_parameters(placed)
    for each in placed:
        each.unbind()
    runner = LayerRunner(
        module, module, list(layers.values()), settings={}, is_output=lambda _, finished, __: bool(tensors_of(finished))
    )
    runner.takes_positions = True  # an input of this name is one of the module's own
    usage = probe_module(runner, {each.name: each.unbound for each in placed}, example.inputs)
    if usage.passing:  # gradients would be added in another order
        raise BadInput(
            f"{type(module).__name__}: the code after its layers uses what is computed before them from "
            f"{min(usage.passing)}, not only the output of the last layer"
            "; such a module cannot be streamed",
            "hook it: ratel.hook",
        )
    segments = _segments(placed, layers_of, usage, num_layers=len(layers))
    dtype, embedded = main_dtype(placed), usage.embedded
    names, value_bytes = ["first", *layers, "last"], VALUE_BYTES[dtype]
    cut = cut_into_blocks(list(zip(names, segments, strict=True)), dtype, rules=rules)
    shape = embedded.hidden.shape
    # [samples, tokens, hidden_size], [samples, channels, height, width], or [samples, hidden_size].
    hidden_size = shape[1] if len(shape) > 3 else shape[-1]
    example = replace(example, sample_tokens=shape[1:].numel() // hidden_size)
    num_tokens = example.num_tokens
    got = [usage.outputs, *(call.tensors for call in embedded.calls), example.inputs.values()]
    spec = ModelSpec(
        name=name or type(module).__name__,
        architecture=type(module).__name__,
        blocks=laid_out(cut, dtype=dtype, gradient_dtype=gradient_dtype, looked_up=None),
        segment_names=tuple(names),
        dtype=dtype,
        hidden_size=hidden_size,
        vocab_size=1,
        sample_tokens=example.sample_tokens,
        carried_bytes=carried_bytes(
            runner,
            embedded,
            segments[0],
            segments[1:-1],
            inputs=example.inputs,
            num_tokens=num_tokens,
            num_probed=num_tokens,
            value_bytes=value_bytes,
        ),
        batch_bytes=ceil(_num_bytes(each for tensors in got for each in tensors) / num_tokens),
        loss_bytes=_HIDDEN_COPIES * hidden_size * value_bytes
        + ceil(sum(each.numel() for each in usage.outputs) * (value_bytes + _LOSS_BYTES) / num_tokens),
        looks_up_rows=False,
    )
    return StackModel(module, runner, spec, [each.parameters for each in cut], example, traits, loss)


def _segments(
    placed: Sequence[PlacedParameter], layers_of: Mapping[str, Sequence[int]], usage: ModuleUsage, *, num_layers: int
) -> list[list[PlacedParameter]]:
    """The parameters of each segment that uses them. `layers_of`: the layers that have a parameter, by its name."""
    segments: list[list[PlacedParameter]] = [[] for _ in range(num_layers + 2)]
    for each in placed:
        is_before, is_after, own = each.name in usage.before, each.name in usage.after, layers_of[each.name]
        users = [*([0] if is_before else []), *(index + 1 for index in own), *([num_layers + 1] if is_after else [])]
        found = each
        if not users:
            users, found = [num_layers + 1], replace(each, is_trained=False)
        elif not (is_before or is_after):
            meta = torch.empty(each.shape, dtype=each.unbound.dtype, device="meta")
            found = replace(each, unbound=nn.Parameter(meta, requires_grad=False))
            found.unbind()
        for user in users:
            segments[user].append(found)
    return segments


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all storages behind the tensors. A shared one counts once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
