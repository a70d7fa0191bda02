"""Finds what goes through a model besides the hidden states that go from layer to layer.

A step runs one layer at a time, on hidden states and on what the owner's code gives every layer. Two kinds of model
need more, and would train wrongly without an error:

* A layer returns something besides its hidden states, and the owner hands it to a layer above, which uses it: the
  indices of the tokens that an indexer chose, for instance. All layers of one kind are tried with it and without it.
* The owner uses what is before the layers once more behind them, as a skip connection does. So its output must not
  depend on the tokens when the output of the last layer is given.

Weights are random stand-ins, so this reads no file. Invariant: a model that passes neither needs nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeAlias

import torch

from ratel_cli.errors import BadInput
from ratel_cli.model.layer_runner import Argument, Embedded, LayerCall, LayerRunner, last_hidden_state
from ratel_cli.model.stand_ins import StandIns, StandsIn
from ratel_cli.model.trials import CANNOT_RUN, one_of_each_kind, ordinary_tokens

_TOKENS = 12
_Output: TypeAlias = "tuple[torch.Tensor, tuple[Argument, ...]]"


def reject_what_is_passed_on(
    layer_runner: LayerRunner, outside: Sequence[StandsIn], layers: Sequence[Sequence[StandsIn]], *, vocab_size: int
) -> None:
    """Raise BadInput, naming what it is, if anything but hidden states goes from layer to layer or past all layers.

    `outside` and `layers` are the model's parameters, unbound and on the CPU.
    """
    training = layer_runner.model.training
    layer_runner.model.eval()
    try:
        with torch.no_grad(), StandIns() as stand_ins:
            _try_owner_and_layers(layer_runner, outside, layers, stand_ins, vocab_size)
    except CANNOT_RUN:
        pass  # it cannot be tried
    finally:
        layer_runner.model.train(training)


def _try_owner_and_layers(
    layer_runner: LayerRunner,
    outside: Sequence[StandsIn],
    layers: Sequence[Sequence[StandsIn]],
    stand_ins: StandIns,
    vocab_size: int,
) -> None:
    positions = torch.arange(_TOKENS).unsqueeze(0)
    first, second = (ordinary_tokens(layer_runner.model, vocab_size, _TOKENS, seed) for seed in (1, 2))
    with stand_ins.bound(outside):
        embedded = layer_runner.embed(first, positions)
        hidden = stand_ins.random(embedded.hidden.shape)
        finished = [last_hidden_state(layer_runner.finish(hidden, ids, positions)) for ids in (first, second)]
        keywords = _keywords_for_extras(layer_runner, embedded, first, positions)
    if not torch.equal(*finished):
        raise BadInput(
            f"{type(layer_runner.model).__name__}: what is behind its layers uses what is before them, and not only the"
            " output of the last layer; such models cannot be streamed"
        )
    if keywords:
        _reject_used(layer_runner, layers, stand_ins, embedded, hidden, keywords)


def _keywords_for_extras(
    layer_runner: LayerRunner, embedded: Embedded, input_ids: torch.Tensor, position_ids: torch.Tensor
) -> list[str]:
    """The keywords with which the owner hands a layer what another one has returned besides its hidden states."""
    if not layer_runner.returns_extras:
        return []
    try:
        layer_runner.extras = [torch.zeros((1, _TOKENS, 1), dtype=torch.long) for _ in embedded.calls]
        calls = layer_runner.embed(input_ids, position_ids).calls
    finally:
        layer_runner.extras = (None,) * len(embedded.calls)
    return list(
        {
            name: None
            for without, given in zip(embedded.calls, calls, strict=True)
            for name, value in given.keywords.items()
            if (value is None) != (without.keywords.get(name) is None)
        }
    )


def _reject_used(
    layer_runner: LayerRunner,
    layers: Sequence[Sequence[StandsIn]],
    stand_ins: StandIns,
    embedded: Embedded,
    hidden: torch.Tensor,
    keywords: Sequence[str],
) -> None:
    """Raise BadInput if a layer computes something else where it is handed what a layer below returns."""
    extra: Argument = None

    def run(index: int, extra: Argument) -> _Output | None:
        call = embedded.calls[index]
        handed = LayerCall(arguments=call.arguments, keywords={**call.keywords, **dict.fromkeys(keywords, extra)})
        with contextlib.suppress(*CANNOT_RUN):
            return layer_runner.run_with_extras(index, hidden, handed)
        return None

    for index in one_of_each_kind(layer_runner, layers, [embedded]):
        with stand_ins.bound(layers[index]):
            without = run(index, None)
            if without is not None and extra is None:
                extra = next(iter(without[1]), None)
            given = None if extra is None else run(index, extra)
        if given is not None and (without is None or not torch.equal(without[0], given[0])):
            raise BadInput(
                f"{type(layer_runner.model).__name__}: layer {index} uses {keywords[0]}, which a layer below returns"
                " besides its hidden states; such models cannot be streamed"
            )
