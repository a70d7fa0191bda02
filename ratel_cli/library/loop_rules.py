"""What a caller's loop does to parameters and gradients between forward, backward and `step()`.

The update of a hooked module is overlapped with its backward, so a step has ended when `step()` is called. In a loop of
plain PyTorch it is `step()` that changes the weights, by gradients that the loop may have changed, dropped or added up.
A loop in which that makes a difference gets an error; one that never calls `step()` is Ratel's own, and may do without
`zero_grad()`, too.

    1. begin     a backward begins: parameters are those that were hooked, and no gradient is there that it would add to
    2. mark      it is over: a mark stands for each gradient, which has its norm and no values
    3. end       step(): the marks are still there, and nothing came between that has seen the weights

Invariant: after `end` the loop has done what it does in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ratel_cli.errors import BadInput
from ratel_cli.model.cut.hooked import HookedModule
from ratel_cli.model.values.away import AwayGradient, hooks_of


class LoopRules:
    """The rules for the loop around one hooked module."""

    def __init__(self, hooked: HookedModule) -> None:
        self._hooked = hooked
        self._marked: dict[str, AwayGradient] = {}
        """By parameter: what stands for its gradient now."""
        self._calls_step = False
        self._num_ended = 0
        """Steps that have ended since `step()` was last called."""
        self._between: str | None = None
        """What has seen the weights of such a step first."""

    @property
    def leaves_step_out(self) -> bool:
        """Whether a loop that calls `step()` has not called it for the last backward."""
        return self._calls_step and self._num_ended > 0

    def begin(self, is_first: bool) -> None:
        """A backward begins, the first one of a step or a later one. Raises BadInput."""
        self._hooked.check()
        if not is_first:
            self._check_marks()
            return
        for name, parameter in self._hooked.trained:
            if parameter.grad is not None and parameter.grad is not self._marked.get(name):
                raise BadInput(
                    f"{name} has a gradient before backward; Ratel does not add to it",
                    "set it to None; add a term to the loss instead",
                )
            if parameter.grad is not None and self._calls_step:
                raise BadInput(
                    "backward comes after step() without zero_grad(): plain PyTorch adds up the gradients of both",
                    "call zero_grad() once for each step()",
                )

    def wait(self) -> None:
        """A backward is over, and others of its step come. Raises BadInput."""
        self._mark({name: None for name, _ in self._hooked.trained})
        for name, parameter in self._hooked.trained:
            if "_post_accumulate_grad_hooks" in hooks_of(parameter):
                raise BadInput(
                    f"{name} has a hook for accumulated gradients, and accumulation_steps adds them up elsewhere",
                    "use register_hook, which gets the gradients of each backward",
                )

    def step_has_ended(self, norms: Mapping[str, float | torch.Tensor]) -> None:
        """Note that a step has ended with its last backward. `norms`: of its gradients, by parameter."""
        self._mark(norms)
        self._num_ended += 1

    def clear(self) -> None:
        """There are no gradients."""
        self._mark({})

    def see(self, what: str) -> None:
        """Something sees the weights, or gradients. Raises BadInput if plain PyTorch has others of them there, since
        `step()` comes later."""
        if not self._num_ended:
            return
        if self._calls_step:
            raise BadInput(
                f"{what} comes between backward and step(), but backward has already updated the weights",
                "call step() right after the last backward of each step; to leave a step out, skip its backward",
            )
        self._between = self._between or what

    def end(self) -> None:
        """`step()` is called, and the step has ended. Raises BadInput."""
        number, between = self._num_ended, self._between
        self._calls_step, self._num_ended, self._between = True, 0, None
        if not number:
            raise BadInput("step() was called, and no backward came since the step before")
        if number > 1:
            raise BadInput(
                f"step() was called after {number} backwards, and each of them was a step of its own",
                f"set accumulation_steps={number} of ratel.AdamW, so that their gradients are added up",
            )
        if between is not None:
            raise BadInput(
                f"step() was called after {between}, which saw the weights that backward has updated",
                "call step() right after the last backward of each step",
            )
        self._check_marks()

    def _mark(self, norms: Mapping[str, float | torch.Tensor | None]) -> None:
        self._marked.clear()
        for name, parameter in self._hooked.trained:
            if name in norms:
                self._marked[name] = AwayGradient.made(parameter)
                self._marked[name].norm_of_step = norms[name]
            parameter.grad = self._marked.get(name)

    def _check_marks(self) -> None:
        for name, parameter in self._hooked.trained:
            if parameter.grad is not self._marked.get(name):
                raise BadInput(
                    f"the gradient of {name} was changed after backward, but backward has already used it for the "
                    "update",
                    "use register_hook to change gradients, and max_grad_norm to clip them",
                )
