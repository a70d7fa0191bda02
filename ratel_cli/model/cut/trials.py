"""Finds out by numbers whether samples that are packed into one sequence stay apart, and whether tokens look ahead.

Attention masks say little: convolutions and recurrences reach over the end of a sample whatever the mask is. So three
samples are packed, the tokens of the first and the last change, and the one between must stay as it is: behind the
embedding, behind a layer of each kind, and behind the final norm. Layers of one kind have the same modules, the same
shapes and the same arguments. Weights are random stand-ins, so this reads no file, and takes seconds for any model.

The first sample is longer than the chunks of 64 tokens in which some recurrences compute, so that a state that goes
from chunk to chunk is met as well as one inside a chunk.

How much layers leave for those above them is found by running all of them once.

Whether a token's result depends on tokens behind it is found in the same way: the second half of a row changes, and the
first half must stay as it is. A model that looks ahead cannot be trained to predict the next token, and what fills up
a row would be seen.

Invariant: a model that cannot be tried is not packed, and does not count as one that looks ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

import torch
from torch import nn
from transformers import PretrainedConfig

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.layer_runner import CANNOT_RUN, Inputs, LayerRunner, last_hidden_state, text_inputs
from ratel_cli.model.cut.probe import special_tokens
from ratel_cli.model.cut.stand_ins import StandIns, StandsIn
from ratel_cli.model.cut.two_stacks import AnyRunner
from ratel_cli.model.values.carried import Carried, Embedded

_SAMPLES = (67, 10, 19)
"""Tokens of each packed sample."""
ROW_TOKENS = _SAMPLES[0]
_TOLERANCE = 1e-9
"""How far the numbers of a sample may move, relative to the largest of them. Those of experts move by some 1e-16: how
their sums are ordered depends on the other tokens."""
_SWITCHED_OFF = "_disable_adapters"
"""The attribute of PEFT's layers. Its own switch would change what is trained, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model whose parameters are unbound and on the CPU, to be tried."""

    layer_runner: AnyRunner
    outside: Sequence[StandsIn]
    """The parameters outside the layers."""
    layers: Sequence[Sequence[StandsIn]]
    vocab_size: int
    num_positions: int | None
    """The most tokens in a sample; None if there is no limit."""

    def samples_stay_apart(self) -> bool:
        """Whether no sample of a packed sequence depends on another one's tokens."""
        samples = [min(size, self.num_positions or size) for size in _SAMPLES]
        positions = torch.cat([torch.arange(size) for size in samples])
        return self._stays_as_it_is(positions, slice(samples[0], samples[0] + samples[1])) is True

    def looks_ahead(self) -> bool:
        """Whether a token's result depends on tokens behind it."""
        num_tokens = min(sum(_SAMPLES), self.num_positions or sum(_SAMPLES))
        return self._stays_as_it_is(torch.arange(num_tokens), slice(0, num_tokens // 2)) is False

    def _stays_as_it_is(self, positions: torch.Tensor, watched: slice) -> bool | None:
        """Whether the watched tokens of a row with these positions `[tokens]` have the same results whatever the other
        tokens are; None if the model cannot be tried."""
        try:
            with trying(self.layer_runner) as stand_ins:
                return self._is_independent(stand_ins, positions.unsqueeze(0), watched)
        except (*CANNOT_RUN, BadInput):
            return None

    def _is_independent(self, stand_ins: StandIns, positions: torch.Tensor, watched: slice) -> bool:
        layer_runner, num_tokens = self.layer_runner, positions.shape[1]
        input_ids = [ordinary_tokens(layer_runner.model, self.vocab_size, num_tokens, seed) for seed in (1, 2)]
        input_ids[1][:, watched] = input_ids[0][:, watched]
        with stand_ins.bound(self.outside):
            rows = [text_inputs(ids, positions) for ids in input_ids]
            embedded = list(map(layer_runner.embed, rows))
            if not _is_same([each.hidden for each in embedded], num_tokens, watched):
                return False
            hidden = [stand_ins.random(each.hidden.shape) for each in embedded]
            _tokens_of(hidden[1], num_tokens, watched).copy_(_tokens_of(hidden[0], num_tokens, watched))
            finished = [
                last_hidden_state(layer_runner.finish(each, row)) for each, row in zip(hidden, rows, strict=True)
            ]
            if not _is_same(finished, num_tokens, watched):
                return False
        carried = list(map(Carried, embedded))
        for index in one_of_each_kind(layer_runner, self.layers, embedded):
            with stand_ins.bound(self.layers[index]):
                outputs = [
                    item.forward(index, partial(layer_runner.run_layer, index, each))
                    for each, item in zip(hidden, carried, strict=True)
                ]
            if not _is_same(outputs, num_tokens, watched):
                return False
        return True


def counts_positions_from_zero(layer_runner: LayerRunner, outside: Sequence[StandsIn], *, vocab_size: int) -> bool:
    """Whether the positions that a model's code takes by default are 0, 1, 2 and so on. Some begin behind the id of the
    token that fills up rows. True if it cannot be tried. `outside`: parameters outside the layers, as in `Trial`."""
    input_ids = ordinary_tokens(layer_runner.model, vocab_size, _SAMPLES[1], seed=1)
    positions = torch.arange(_SAMPLES[1]).unsqueeze(0)
    try:
        with trying(layer_runner) as stand_ins, stand_ins.bound(outside):
            given = layer_runner.embed(text_inputs(input_ids, positions))
            default = layer_runner.embed({"input_ids": input_ids})
    except (*CANNOT_RUN, BadInput):
        return True
    found, wanted = (
        [each.hidden, *(tensor for call in each.calls for tensor in call.tensors)] for each in (given, default)
    )
    # A layer may get positions that were given, and none by default.
    compared = [each for each in found if each is not positions] if len(found) > len(wanted) else found
    return len(compared) == len(wanted) and all(map(torch.equal, compared, wanted))


@contextlib.contextmanager
def trying(layer_runner: AnyRunner) -> Iterator[StandIns]:
    """A context in which the model computes with stand-ins, without draws and without adapters.

    What an adapter adds mixes no more tokens than the matrix beside it. PEFT adds that of a stack of experts to the
    whole stack, which stands on few numbers only as long as nothing is added to it.
    """
    training = layer_runner.model.training
    adapted = [each for each in layer_runner.model.modules() if getattr(each, _SWITCHED_OFF, None) is False]
    layer_runner.model.eval()
    try:
        for each in adapted:
            setattr(each, _SWITCHED_OFF, True)
        with torch.no_grad(), StandIns() as stand_ins:
            yield stand_ins
    finally:
        for each in adapted:
            setattr(each, _SWITCHED_OFF, False)
        layer_runner.model.train(training)


def ordinary_row(model: nn.Module, vocab_size: int) -> Inputs:
    """A row of `ROW_TOKENS` random tokens."""
    positions = torch.arange(ROW_TOKENS).unsqueeze(0)
    return text_inputs(ordinary_tokens(model, vocab_size, ROW_TOKENS, seed=1), positions)


def ordinary_tokens(model: nn.Module, vocab_size: int, num_tokens: int, seed: int) -> torch.Tensor:
    """Random tokens `[1, num_tokens]`, none of which the model's configuration names: it may mean padding."""
    config = model.config
    assert isinstance(config, PretrainedConfig)
    special = set(special_tokens(config, vocab_size))
    ordinary = torch.tensor([token for token in range(min(vocab_size, 4096)) if token not in special] or [0])
    chosen = torch.randint(len(ordinary), (1, num_tokens), generator=torch.Generator().manual_seed(seed))
    return ordinary[chosen]


def _tokens_of(hidden: torch.Tensor, num_tokens: int, chosen: slice) -> torch.Tensor:
    """A part of the tokens of `[1, tokens, ..]`. Some models have several hidden states, in a dimension before."""
    return hidden[(slice(None),) * list(hidden.shape).index(num_tokens) + (chosen,)]


def _is_same(outputs: Sequence[torch.Tensor], num_tokens: int, watched: slice) -> bool:
    """Whether the numbers of the watched tokens are equal in both outputs. Raises RuntimeError if they are not finite,
    which says nothing."""
    first, second = (_tokens_of(each, num_tokens, watched) for each in outputs)
    if not (first.isfinite().all() and second.isfinite().all()):
        raise RuntimeError("stand-ins give numbers that are not finite")
    return bool((first - second).abs().max() <= _TOLERANCE * first.abs().max())


def one_of_each_kind(
    layer_runner: AnyRunner, layers: Sequence[Sequence[StandsIn]], embedded: Sequence[Embedded]
) -> list[int]:
    """The first layer of each kind."""
    kinds: dict[object, int] = {}
    for index, parameters in enumerate(layers):
        shapes = tuple(each.computed_shape for each in parameters)
        # Where layers need what those below have left or returned, each is of a kind of its own.
        call = tuple(
            (*map(id, each.calls[index].tensors), *([index] if each.links_layers else [])) for each in embedded
        )
        kinds.setdefault((shapes, call, _modules(layer_runner.layers[index], index)), index)
    return list(kinds.values())


def _modules(layer: nn.Module, index: int) -> tuple[object, ...]:
    """What the layer's modules are, and their settings: names, switches and numbers, other than the layer's own."""
    return tuple(
        (
            type(module),
            tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, str | bool) or (isinstance(value, int) and value != index)
            ),
        )
        for module in layer.modules()
    )


def carried_bytes(
    layer_runner: AnyRunner,
    probed: Embedded,
    outside: Sequence[StandsIn],
    layers: Sequence[Sequence[StandsIn]],
    *,
    inputs: Inputs,
    num_tokens: int,
    num_probed: int,
    value_bytes: int,
) -> int:
    """Bytes, for one token, of what layers get besides hidden states that has a gradient or comes from layers below; of
    the latter 0 if the model cannot be tried. `probed`: what is before the layers, for `num_probed` tokens. `inputs`:
    of `num_tokens` tokens, to be tried."""
    elements = _elements(probed.carried) / num_probed
    if probed.links_layers:
        with contextlib.suppress(*CANNOT_RUN, BadInput), trying(layer_runner) as stand_ins:
            with stand_ins.bound(outside):
                embedded = layer_runner.embed(inputs)
            carried = Carried(embedded)
            for index, parameters in enumerate(layers):
                with stand_ins.bound(parameters):
                    carried.forward(index, partial(layer_runner.run_layer, index, embedded.hidden))
            elements += _elements(carried.from_layers) / num_tokens
    return ceil(elements * value_bytes)


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    """Elements of all storages behind the tensors. A shared one counts once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() // each.itemsize for each in tensors}
    return sum(storages.values())
