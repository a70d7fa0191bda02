"""Finds out by numbers what a model's code does around its layers, and refuses what a step would not do.

A step calls the owner of the layers on tokens, then the layers, then the owner's code behind them on the output of the
last one alone. Two kinds of models would train wrongly so, without an error: one that uses what is before its layers
once more behind them, as a skip connection does; and one whose class does more with text than its owner. A model with
a vision tower, say, may give text another mask, or read the tower.

Weights are random stand-ins, so this reads no file, and takes no time.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from operator import itemgetter

import torch
from torch.utils._pytree import tree_flatten

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.layer_runner import CANNOT_RUN, Inputs, LayerRunner, last_hidden_state, text_inputs
from ratel_cli.model.cut.stand_ins import StandIns, StandsIn
from ratel_cli.model.cut.trials import ordinary_tokens, trying
from ratel_cli.model.cut.two_stacks import TwoStackRunner
from ratel_cli.model.values.carried import Embedded

_TOKENS = 12
_ROW_TOKENS = 4
"""Tokens of a row whose logits are computed."""
_ROUNDING = 0.02
"""How far logits may move, relative to the largest, since products of other sizes round otherwise in 16 bit."""


def reject_what_passes_all_layers(layer_runner: LayerRunner, outside: Sequence[StandsIn], *, vocab_size: int) -> None:
    """Raise BadInput if something before the layers is used behind them. `outside`: the parameters outside the layers,
    unbound and on the CPU."""
    positions = torch.arange(_TOKENS).unsqueeze(0)
    tokens = [ordinary_tokens(layer_runner.model, vocab_size, _TOKENS, seed) for seed in (1, 2)]
    rows = [text_inputs(ids, positions) for ids in tokens]
    try:
        with trying(layer_runner) as stand_ins, stand_ins.bound(outside):
            hidden = stand_ins.random(layer_runner.embed(rows[0]).hidden.shape)
            finished = [last_hidden_state(layer_runner.finish(hidden, row)) for row in rows]
    except CANNOT_RUN:
        return  # it cannot be tried
    if not torch.equal(*finished):
        raise BadInput(
            f"{type(layer_runner.model).__name__}: the code after its layers uses results from before them, not only "
            "the output of the last layer"
            "; such models cannot be streamed"
        )


def reject_other_text(
    layer_runner: LayerRunner, outside: Sequence[StandsIn], *, vocab_size: int, has_other_parts: bool
) -> None:
    """Raise BadInput unless the model does with rows of text what the owner of its layers does: it calls the layers
    with the same, to the last bit, and makes the same logits of the last one's output. And unless it makes the logits
    of each token from that token alone: a step has the head compute tokens of several rows as one row.

    A model may hand all its keywords down. Those of its own that are not set, and that no layer names, say nothing to
    layers: `labels` is one.

    `outside`: as above. With `has_other_parts`, parameters of which are on the meta device, so that code that reads
    them fails, a model that cannot be tried is refused too.
    """
    name = type(layer_runner.model).__name__
    tokens = [ordinary_tokens(layer_runner.model, vocab_size, _ROW_TOKENS, seed) for seed in (1, 2)]
    rows = {"input_ids": torch.cat(tokens)}
    with trying(layer_runner) as stand_ins, stand_ins.bound(outside):
        try:
            wanted = _of_owner(layer_runner, rows, stand_ins)
        except CANNOT_RUN:
            wanted = None
        if wanted is None and not has_other_parts:
            return  # it cannot be tried
        try:
            found = None if wanted is None else _flat(layer_runner, *layer_runner.run_model(rows, wanted[0]))
        except (*CANNOT_RUN, BadInput, AssertionError):
            found = None
    if wanted is None or found is None:
        raise _no_part(name, "it cannot run on text alone")
    if not _is_same(found, wanted[1]):
        raise _no_part(name, "for text it computes something else than the module with its layers")
    if not wanted[2]:
        raise BadInput(
            f"{name}: its head computes the logits of a token from other tokens too; such models cannot be streamed"
        )


def reject_other_pairs(runner: TwoStackRunner, outside: Sequence[StandsIn], *, vocab_size: int) -> None:
    """Raise BadInput unless the model does with two texts what its stacks do one after the other: it calls the layers
    of both with the same, and makes the same logits of the last one's output. `outside`: as above."""
    source, target = (ordinary_tokens(runner.model, vocab_size, tokens, 1) for tokens in (_TOKENS, _ROW_TOKENS))
    inputs = {"input_ids": source, "decoder_input_ids": target, "attention_mask": torch.ones_like(source)}
    try:
        with trying(runner.decoder) as stand_ins, stand_ins.bound(outside):
            embedded = runner.embed(inputs)
            hidden = stand_ins.random((1, _ROW_TOKENS, embedded.hidden.shape[-1]))
            finished = runner.finish(hidden, inputs)
            wanted = runner.logits(finished, last_hidden_state(finished))
            _, (states,) = runner.run_layer(runner.bridge, embedded.hidden, embedded.calls[runner.bridge])
            below, above, found = runner.run_model(inputs, hidden)
    except CANNOT_RUN as error:
        raise _no_pairs(runner, f"it cannot run on two texts alone ({type(error).__name__})") from error
    stands_for, own = embedded.extras[runner.bridge][0], list(embedded.calls)
    del own[runner.bridge]
    # The whole model's layers have done nothing: the encoder's states are those that the bridge makes of its input.
    passed = [states if each is stands_for else each for call in own for each in call.tensors]
    ours: list[object] = [embedded.hidden, embedded.second, *passed, wanted]
    their_tensors = (each for call in (*below.calls, *above.calls) for each in call.tensors)
    theirs: list[object] = [below.hidden, above.hidden, *their_tensors, found]
    if not _is_same(theirs, ours):
        raise _no_pairs(runner, "for two texts it computes something else than its encoder and its decoder")


def _no_pairs(runner: TwoStackRunner, reason: str) -> BadInput:
    return BadInput(f"{type(runner.model).__name__}: {reason}; such models cannot be streamed")


def _no_part(name: str, reason: str) -> BadInput:
    return BadInput(
        f"{name}: its language model cannot be trained within it: {reason}",
        "save the language model as a model of its own and train that; docs/guide/models.md shows how",
    )


def _of_owner(layer_runner: LayerRunner, rows: Inputs, stand_ins: StandIns) -> tuple[torch.Tensor, list[object], bool]:
    """An output of the last layer; what layers get, and the logits of that output, as a flat list; and whether these
    are the logits of all rows as one row, but for rounding."""
    embedded = layer_runner.embed(rows)
    hidden = stand_ins.random(embedded.hidden.shape)
    finished = layer_runner.finish(hidden, rows)
    # All rows at once, as the model does: for each row alone, a matrix product may round differently.
    last = last_hidden_state(finished)
    logits = layer_runner.logits(finished, last)
    as_one_row = layer_runner.logits(finished, last.reshape(1, -1, last.shape[-1]))
    is_alike = as_one_row.numel() == logits.numel() and bool(
        (as_one_row.reshape(logits.shape) - logits).abs().max() <= _ROUNDING * logits.abs().max()
    )
    return hidden, _flat(layer_runner, embedded, logits), is_alike


def _flat(layer_runner: LayerRunner, embedded: Embedded, logits: torch.Tensor) -> list[object]:
    own, named = inspect.signature(layer_runner.model.forward).parameters, layer_runner.named_by_layers

    def says_something(keyword: str, value: object) -> bool:
        return keyword in named or keyword not in own or isinstance(value, torch.Tensor) or bool(value)

    calls = [
        (call.arguments, [item for item in sorted(call.keywords.items(), key=itemgetter(0)) if says_something(*item)])
        for call in embedded.calls
    ]
    return tree_flatten([embedded.hidden, calls, logits])[0]


def _is_same(found: list[object], wanted: list[object]) -> bool:
    def equal(one: object, other: object) -> bool:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.device == other.device and one.dtype == other.dtype and torch.equal(one, other)
        return type(one) is type(other) and (one == other or not isinstance(one, str | int | float | bool))

    return len(found) == len(wanted) and all(map(equal, found, wanted))
