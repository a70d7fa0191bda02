"""AdamW for a hooked module, as an optimizer of torch: groups and schedulers work as usual, the update is Ratel's.

Invariant: what a group asks for is done, or rejected: nothing in it is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ratel_cli.engine.optimizer.settings import OptimizerSettings, adamw_settings
from ratel_cli.errors import BadInput

_SHARED = ("lr", "betas", "eps")
_LEFT_OUT = ("amsgrad", "maximize", "capturable", "differentiable")
"""Settings of torch's AdamW that must be off."""


class StepsOfModule(Protocol):
    """The training state of a hooked module."""

    def follow(self, optimizer: AdamW) -> None:
        """Update by this optimizer from now on."""

    def end_step(self, optimizer: AdamW) -> None:
        """End the step, if its last backward has not ended it. Raises BadInput if it follows another optimizer."""

    def drop_gradients(self) -> None:
        """Drop the gradients of a step that has not ended."""


HOOKED: WeakKeyDictionary[nn.Module, StepsOfModule] = WeakKeyDictionary()
"""The modules that are hooked now."""


class AdamW(torch.optim.Optimizer):
    """AdamW in fp32 for the trained parameters of one hooked module, overlapped with backward."""

    def __init__(
        self,
        parameters: nn.Module | Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        accumulation_steps: int = 1,
    ) -> None:
        """`parameters`: the module that is hooked, all of its trained parameters, or groups of these; groups may differ
        in whether they have weight decay. Defaults are torch's. `max_grad_norm` clips the norm of all gradients; None
        does not. `accumulation_steps`: rounds of forward and backward in a step, whose gradients are added up.

        A step ends with its last backward; `step` need not be called. Raises BadInput.
        """

        if isinstance(parameters, nn.Module):
            parameters = [each for each in parameters.parameters() if each.requires_grad]
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if accumulation_steps < 1:
            raise BadInput(f"accumulation_steps must be at least 1, not {accumulation_steps}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise BadInput(f"max_grad_norm must be above 0, not {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self._num_rounds = accumulation_steps
        self._hooked = _state_of(each for group in self.param_groups for each in group["params"])
        self._used_rate: float | None = None
        """Learning rate of the step whose backward began last, until `step`; None if there is none."""
        self._has_begun = False
        """Whether a step has."""
        self._check_groups()
        self._first_settings, self._first_decays = self.settings, self.decays
        self._hooked.follow(self)

    @property
    def learning_rate(self) -> float:
        """The learning rate that the groups have now. Raises BadInput if they differ, or if other settings were
        changed."""
        rate = float(self.param_groups[0]["lr"])
        if not math.isfinite(rate) or rate < 0:
            raise BadInput(f"lr must be a number from 0 on, not {rate}")
        self._check_groups()
        if (self.settings, self.decays) != (self._first_settings, self._first_decays):
            raise BadInput(
                "betas, eps, weight_decay or the parameters of an optimizer were changed",
                "make a new one; a scheduler that cycles betas needs cycle_momentum=False",
            )
        return rate

    def begin_step(self) -> float:
        """The learning rate of a step whose backward begins. Raises BadInput as `learning_rate`."""
        self._has_begun = True
        self._used_rate = self.learning_rate
        return self._used_rate

    @property
    def num_rounds(self) -> int:
        """Rounds of forward and backward in a step."""
        return self._num_rounds

    @property
    def settings(self) -> OptimizerSettings:
        """The settings of AdamW that stay from step to step."""
        first, decays = self.param_groups[0], self._weight_decays()
        beta1, beta2 = first["betas"]
        return adamw_settings(beta1=beta1, beta2=beta2, epsilon=first["eps"], weight_decay=max(decays))

    @property
    def decays(self) -> Mapping[int, bool]:
        """Whether weight decay applies, by the `id` of a parameter."""
        return {id(each): group["weight_decay"] != 0 for group in self.param_groups for each in group["params"]}

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """End the step, if its last backward has not. A closure computes its loss and its backward first.

        Raises BadInput if no backward came since the step before, or if several steps have ended since the last call.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rate = self._used_rate
        if rate is not None and rate != self.learning_rate:
            raise BadInput(
                f"lr was changed to {self.learning_rate} after backward, whose step has used {rate}",
                "change it before backward: after step(), as schedulers do",
            )
        self._hooked.end_step(self)
        self._used_rate = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002 (as torch has it)
        """Drop the gradients of a step that has not ended."""
        self._hooked.drop_gradients()

    @property  # type: ignore[override]
    def state(self) -> dict[nn.Parameter, Any]:
        """Empty before the first step, and not there after it: it is on the drives."""
        if self._has_begun:
            raise _moments()
        return _NoMoments()

    @state.setter
    def state(self, _: object) -> None:
        if "_hooked" in vars(self):  # else torch begins with it
            raise _moments()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the settings of groups. Raises BadInput if there are moments, here or there."""
        if self._has_begun or state_dict["state"]:
            raise _moments()
        super().load_state_dict(dict(state_dict))

    def _check_groups(self) -> None:
        first = self.param_groups[0]
        for group in self.param_groups:
            numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
            if not all(isinstance(each, int | float) for each in numbers):  # torch rounds elsewhere with a Tensor
                raise BadInput(
                    f"lr, betas, eps and weight_decay must be Python's numbers, not {numbers}",
                    "take item() of a Tensor",
                )
            if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
                raise BadInput("Adam with weight_decay is not AdamW: it adds the decay to the gradient", "use AdamW")
            for name in _SHARED:
                if group[name] != first[name]:
                    raise BadInput(
                        f"groups of parameters have {name} {first[name]} and {group[name]}; they must share it",
                        "give all groups the same, or hook modules of their own",
                    )
            for name in _LEFT_OUT:
                if group.get(name):
                    raise BadInput(f"{name} is not there; set it to False")
        self._weight_decays()

    def _weight_decays(self) -> set[float]:
        found = {float(group["weight_decay"]) for group in self.param_groups}
        if len(found - {0.0}) > 1:
            raise BadInput(f"groups of parameters have weight_decay {sorted(found)}; it must be 0 or one other number")
        return found


class _NoMoments(dict[nn.Parameter, Any]):
    """Has none, and takes none."""

    def __getitem__(self, *_: object) -> NoReturn:
        raise _moments()

    __setitem__ = __getitem__


def _moments() -> BadInput:
    return BadInput(
        "the moments of a hooked module are on its drives, and neither read nor written in its optimizer",
        "read them with state() of what ratel.hook gave; for new ones, hook with other storage",
    )


class Optimizer(AdamW):
    """Ratel's AdamW with the settings of an optimizer of torch: `Optimizer(torch.optim.AdamW(net.parameters()))`."""

    def __init__(
        self, settings: torch.optim.Optimizer, *, max_grad_norm: float | None = None, accumulation_steps: int = 1
    ) -> None:
        """`settings`: torch's AdamW, or Adam without weight decay. Its groups are used from now on, so that
        a scheduler of it works. It must not step itself. Raises BadInput."""
        if type(settings) not in (torch.optim.AdamW, torch.optim.Adam):
            raise BadInput(
                f"the optimizer is {type(settings).__name__}; Ratel has AdamW, and Adam without weight decay"
            )
        groups = [dict(group) for group in settings.param_groups]
        super().__init__(groups, max_grad_norm=max_grad_norm, accumulation_steps=accumulation_steps)
        self.param_groups = settings.param_groups


def _state_of(parameters: Iterable[nn.Parameter]) -> StepsOfModule:
    """The hooked module that has just these trained parameters. Raises BadInput."""
    given = {id(each) for each in parameters}
    for module, hooked in HOOKED.items():
        trained = {id(each) for each in module.parameters() if each.requires_grad}
        if trained & given:
            if trained != given:
                raise BadInput(
                    f"the optimizer has {len(given)} parameters, and {type(module).__name__} {len(trained)} that are "
                    "trained",
                    "give it all of them; what is not trained must have no requires_grad before ratel.hook",
                )
            return hooked
    raise BadInput("the optimizer's parameters are not those of a hooked module", "call ratel.hook(module) before")
