"""Finds out whether the owner uses what is before its layers once more behind them, as a skip connection does.

A step runs what is behind the layers on the output of the last one alone, so such a model would train wrongly, without
an error. Its output is tried: it must not depend on the tokens when the output of the last layer is given. Weights are
random stand-ins, so this reads no file, and takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ratel_cli.errors import BadInput
from ratel_cli.model.layer_runner import LayerRunner, last_hidden_state
from ratel_cli.model.stand_ins import StandsIn
from ratel_cli.model.trials import CANNOT_RUN, ordinary_tokens, trying

_TOKENS = 12


def reject_what_passes_all_layers(layer_runner: LayerRunner, outside: Sequence[StandsIn], *, vocab_size: int) -> None:
    """Raise BadInput if something before the layers is used behind them. `outside`: the parameters outside the layers,
    unbound and on the CPU."""
    positions = torch.arange(_TOKENS).unsqueeze(0)
    rows = [ordinary_tokens(layer_runner.model, vocab_size, _TOKENS, seed) for seed in (1, 2)]
    try:
        with trying(layer_runner) as stand_ins, stand_ins.bound(outside):
            hidden = stand_ins.random(layer_runner.embed(rows[0], positions).hidden.shape)
            finished = [last_hidden_state(layer_runner.finish(hidden, ids, positions)) for ids in rows]
    except CANNOT_RUN:
        return  # it cannot be tried
    if not torch.equal(*finished):
        raise BadInput(
            f"{type(layer_runner.model).__name__}: what is behind its layers uses what is before them, and not only the"
            " output of the last layer; such models cannot be streamed"
        )
