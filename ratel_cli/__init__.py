"""Ratel: fine-tuning of models larger than GPU memory and RAM.

What a loop of one's own needs is here; docs/library.md explains it. The names are loaded when they are first used:
that takes seconds, and the command line needs none of them. Importing this package loads no torch, and sets how torch's
threads wait.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ratel_cli.errors import RatelError
from ratel_cli.openmp import let_idle_threads_sleep

if TYPE_CHECKING:
    from ratel_cli.library.explaining import explain
    from ratel_cli.library.hooking import Hooked, hook
    from ratel_cli.library.initialising import init
    from ratel_cli.library.limits import Limits
    from ratel_cli.library.model import Model
    from ratel_cli.library.offloading import offload_activations
    from ratel_cli.library.opening import open_model as open  # noqa: A004 (as in `ratel.open`)
    from ratel_cli.library.optimizer import AdamW, Optimizer

__all__ = [
    "AdamW",
    "Hooked",
    "Limits",
    "Model",
    "Optimizer",
    "RatelError",
    "explain",
    "hook",
    "init",
    "offload_activations",
    "open",
]

_HOMES = {
    "AdamW": ("ratel_cli.library.optimizer", "AdamW"),
    "Hooked": ("ratel_cli.library.hooking", "Hooked"),
    "Limits": ("ratel_cli.library.limits", "Limits"),
    "Model": ("ratel_cli.library.model", "Model"),
    "Optimizer": ("ratel_cli.library.optimizer", "Optimizer"),
    "init": ("ratel_cli.library.initialising", "init"),
    "explain": ("ratel_cli.library.explaining", "explain"),
    "hook": ("ratel_cli.library.hooking", "hook"),
    "offload_activations": ("ratel_cli.library.offloading", "offload_activations"),
    "open": ("ratel_cli.library.opening", "open_model"),
}

let_idle_threads_sleep()  # here, since torch has read how they wait once it is loaded


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _HOMES[name]
    return getattr(import_module(module), own)
