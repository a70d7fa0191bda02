"""What an adapter is, in PEFT's words, for whoever has no need of PEFT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ratel_cli.sizes import Task

ALL_LINEAR: Final = "all-linear"
"""PEFT's word for all linear layers but the head."""


def base_name(name: str) -> str:
    """The name of a base parameter in the model without adapters."""
    return name.replace(".token_adapter", "").replace(".base_layer", "")


def is_of_tokens(name: str) -> bool:
    """Whether a parameter is the rows of some tokens, which an adapter trains beside the frozen matrix."""
    return ".token_adapter.trainable_tokens_delta." in name


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """What an adapter is, in PEFT's words."""

    rank: int
    alpha: int
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str = ALL_LINEAR
    """Ends of names of modules; one string is a regular expression, or `ALL_LINEAR`."""
    target_parameters: tuple[str, ...] = ()
    """Ends of names of stacks of experts' matrices, which are no modules."""
    layers: tuple[int, ...] = ()
    """The layers that have one; none: all."""
    scales_by_root: bool = False
    """rsLoRA: divides `alpha` by the root of the rank."""
    has_magnitudes: bool = False
    """DoRA: the length of each output's weights is trained by itself."""
    initialisation: bool | Literal["gaussian"] = True
    tokens: tuple[int, ...] = ()
    """Tokens whose rows are trained of the embedding and the head that are frozen (`trainable_token_indices`)."""
    saved_modules: tuple[str, ...] = ()
    """Ends of names of modules of the base that are trained whole, and are part of the adapter (`modules_to_save`)."""
    ties_saved: bool = False
    """A matrix that embedding and head share stays one where it is saved (`ensure_weight_tying`)."""
    task: Task = "causal_lm"
    also_named: tuple[str, ...] = ()
    """Ends of names of modules that must have one, too, because all linear layers do."""
