"""Which parameters of a model are trained, chosen by patterns over their names.

A pattern is a regular expression that matches from the beginning of a name, as in axolotl: a dot is a dot, unless `+`,
`*`, `?` or `{` follows it, so that `model.layers.2[0-9]+.mlp` needs no backslashes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from ratel_cli.errors import BadInput

_PLAIN_DOT = re.compile(r"(?<!\\)\.(?![+*?{])")
_ROWS = re.compile(r"\[[0-9]*:?[0-9]*\]$")
"""Matches axolotl's rows of one matrix, behind a pattern."""


def freeze(model: nn.Module, *, unfrozen: Sequence[str], frozen: Sequence[str]) -> None:
    """Freeze all parameters that match no pattern of `unfrozen`, if there are any, and those that match one of
    `frozen`. What the model's own code has frozen stays so.

    Raises BadInput if a pattern is no regular expression, or matches nothing, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    kept = {name for pattern in unfrozen for name in _matching(pattern, names, "unfrozen_parameters")}
    left_out = {name for pattern in frozen for name in _matching(pattern, names, "frozen_parameters")}
    for name, parameter in model.named_parameters():
        if (unfrozen and name not in kept) or name in left_out:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        keys = [key for key, given in (("unfrozen_parameters", unfrozen), ("frozen_parameters", frozen)) if given]
        raise BadInput(f"{' and '.join(keys)}: no parameter is left to train", "name fewer, or others")


def _matching(pattern: str, names: Sequence[str], key: str) -> list[str]:
    if _ROWS.search(pattern):
        hint = "Ratel trains a parameter whole or not; for one of several digits write (0|1) instead of [01]"
        raise _error(key, f"{pattern}: brackets at the end are rows of a matrix", hint)
    try:
        expression = re.compile(_PLAIN_DOT.sub(r"\\.", pattern))
    except re.error as error:
        raise _error(key, f"{pattern}: not a regular expression: {error}") from error
    found = [name for name in names if expression.match(name)]
    if not found:
        raise _error(key, f"{pattern}: matches no parameter", f"the model has {', '.join(names[:3])}, ...")
    return found


def _error(key: str, message: str, hint: str | None = None) -> BadInput:
    """An error about a key of the config."""
    error = BadInput(f"{key}: {message}", hint)
    error.key = (key,)
    return error
