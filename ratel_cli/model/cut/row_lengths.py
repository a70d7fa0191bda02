"""Finds out which numbers of tokens a model's layers can train on.

Some layers compute a row in chunks, and fail unless the chunk divides the row. One layer of each kind runs on random
stand-ins for its weights, in training mode, as in a step; if it fails on a row of an odd length, the sizes in the
model's configuration are tried.

Invariant: a model that runs on no row that is tried here has no rule that we know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import PretrainedConfig

from ratel_cli.model.cut.layer_runner import CANNOT_RUN, text_inputs
from ratel_cli.model.cut.stand_ins import StandIns, StandsIn
from ratel_cli.model.cut.trials import one_of_each_kind
from ratel_cli.model.cut.two_stacks import AnyRunner
from ratel_cli.model.values.carried import Carried

_TOKENS = (67, 61, 31, 13, 7, 5, 3)
"""The first that the model has positions for is tried. Prime numbers, and more than most chunks have: some layers take
any row that is shorter than a chunk."""
_LONGEST_CHUNK = 1024


def row_multiple(
    layer_runner: AnyRunner,
    outside: Sequence[StandsIn],
    layers: Sequence[Sequence[StandsIn]],
    *,
    num_positions: int | None,
) -> int:
    """The number that must divide the tokens of a row; 1 if rows of any length can be trained on.

    `outside` and `layers` are the model's parameters, unbound and on the CPU. `num_positions`: the most tokens in a
    row; None if there is no limit.
    """
    most = num_positions or _TOKENS[0] + _LONGEST_CHUNK

    def runs(num_tokens: int) -> bool:
        positions = torch.arange(num_tokens).unsqueeze(0)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), StandIns() as stand_ins:
                with stand_ins.bound(outside):
                    embedded = layer_runner.embed(text_inputs(torch.zeros_like(positions), positions))
                carried = Carried(embedded)
                for index in one_of_each_kind(layer_runner, layers, [embedded]):
                    with stand_ins.bound(layers[index]):
                        carried.forward(index, partial(layer_runner.run_layer, index, embedded.hidden))
        except CANNOT_RUN:
            return False
        return True

    if runs(next((tokens for tokens in _TOKENS if tokens <= most), 1)):
        return 1
    config = layer_runner.model.config
    assert isinstance(config, PretrainedConfig)
    sizes = {value for value in config.get_text_config().to_dict().values() if type(value) is int}
    for size in sorted(size for size in sizes if 1 < size <= _LONGEST_CHUNK):
        fitting = [number * size for number in (1, 2, 3) if number * size <= most]
        if fitting and all(map(runs, fitting)) and not runs(size + 1):
            return size
    return 1
