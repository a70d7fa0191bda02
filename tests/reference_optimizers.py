"""Optimizers in plain PyTorch that torch itself does not have. Invariant: nothing here imports `ratel_cli`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.kernels.rules import quantised, restored, signed_map, unsigned_map

LEAST_8BIT = 4096
"""Smaller parameters have moments in fp32."""


class _Rule(torch.optim.Optimizer):
    """Each parameter is updated by itself, by its group's settings."""

    def __init__(self, groups: list[dict[str, Any]], **settings: object) -> None:
        super().__init__(groups, {**settings})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter].setdefault("step", 0)
                    self.state[parameter]["step"] += 1
                    self.update(parameter, parameter.grad, self.state[parameter], group)

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Lion(_Rule):
    """As its authors wrote it (Chen et al., 2023)."""

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta1, beta2 = group["betas"]
        mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_((mean * beta1 + gradient * (1 - beta1)).sign_(), alpha=-group["lr"])
        mean.mul_(beta2).add_(gradient, alpha=1 - beta2)


class Factored(_Rule):
    """A mean of squared gradients by row and by column of a matrix (Shazeer and Stern, 2018), or of a vector."""

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        beta = 1 - state["step"] ** -0.8
        square = gradient**2 + 1e-30
        if parameter.ndim == 1:
            v = state["v"] = torch.lerp(state.get("v", torch.zeros_like(square)), square, 1 - beta)
            update = gradient / torch.sqrt(v)
        else:
            rows, columns = square.mean(dim=-1), square.mean(dim=-2)
            r = state["r"] = torch.lerp(state.get("r", torch.zeros_like(rows)), rows, 1 - beta)
            c = state["c"] = torch.lerp(state.get("c", torch.zeros_like(columns)), columns, 1 - beta)
            update = gradient / torch.sqrt((r / r.mean(dim=-1, keepdim=True))[..., None] * c[..., None, :])
            update = update / torch.clamp((update**2).mean().sqrt(), min=1)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


class _ProductsOn(TorchFunctionMode):
    """Products of bf16 matrices, and norms, are computed on a device; on a CPU without bf16 in fp32, and rounded."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        is_slow = device == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._dtype = torch.float32 if is_slow else torch.bfloat16

    def __torch_function__(
        self,
        function: Callable[..., torch.Tensor],
        types: object,
        args: tuple[torch.Tensor, ...] = (),
        kwargs: dict[str, float] | None = None,
    ) -> torch.Tensor:
        options = kwargs or {}
        if function is torch.Tensor.norm:
            return function(args[0].to(self._device), **options).cpu()
        if function not in (torch.addmm, torch.Tensor.__matmul__, torch.Tensor.matmul):
            return function(*args, **options)
        return function(*(each.to(self._device, self._dtype) for each in args), **options).bfloat16().cpu()


class Muon(torch.optim.Muon):
    """torch's, with matrix products on the device where the model computes."""

    def __init__(self, groups: list[dict[str, Any]], *, device: str, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(groups, **settings)
        self._device = device

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        with _ProductsOn(self._device):
            super().step()


class AdamW8bit(_Rule):
    """Block-wise moments in 8 bit (Dettmers et al., 2022), as bitsandbytes computes with them."""

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        (beta1, beta2), of_m, of_v, size = group["betas"], signed_map(), unsigned_map(), parameter.numel()
        if "m" not in state:
            state["m"], state["v"] = quantised(torch.zeros(size), of_m), quantised(torch.zeros(size), of_v)
        m = restored(*state["m"], of_m).view_as(parameter)
        v = restored(*state["v"], of_v).view_as(parameter)
        m.mul_(beta1).add_(gradient, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (v.sqrt() / (1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(m, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
        state["m"], state["v"] = quantised(m.flatten(), of_m), quantised(v.flatten(), of_v)


def optimizers_of(
    name: str,
    groups: list[dict[str, Any]],
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    embeddings: Collection[torch.Tensor] = (),
    others: Collection[torch.Tensor] = (),
    device: str = "cpu",
    adjust_lr_fn: str = "match_rms_adamw",
) -> list[torch.optim.Optimizer]:
    """The optimizers of a run, which step one after another, with the defaults of Ratel's config. Groups have
    parameters and their weight decay. `embeddings`: with 8-bit moments, these have them in fp32, as transformers'
    Trainer has it. Muon updates matrices that are neither these nor `others`,
    such as biases and what is in no layer, and multiplies them on `device`."""
    looked_up, left_out = set(map(id, embeddings)), set(map(id, others))

    def only(has: Callable[[torch.Tensor], bool], *, wanted: bool) -> list[dict[str, Any]]:
        return [{**group, "params": [each for each in group["params"] if has(each) is wanted]} for group in groups]

    betas = (0.9, 0.999)
    if name == "lion":
        return [Lion(groups, lr=learning_rate, betas=betas)]
    if name == "factored":
        return [Factored(groups, lr=learning_rate)]
    if name == "sgd":
        return [torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, nesterov=nesterov, foreach=False)]
    if name == "adamw_8bit":

        def is_large(parameter: torch.Tensor) -> bool:
            return parameter.numel() >= LEAST_8BIT and id(parameter) not in looked_up

        return [
            AdamW8bit(only(is_large, wanted=True), lr=learning_rate, betas=betas, eps=1e-8),
            torch.optim.AdamW(only(is_large, wanted=False), lr=learning_rate, foreach=False),
        ]
    if name == "muon":

        def is_hidden(parameter: torch.Tensor) -> bool:
            return parameter.ndim == 2 and id(parameter) not in looked_up | left_out

        return [
            Muon(
                only(is_hidden, wanted=True),
                lr=learning_rate,
                momentum=momentum or 0.95,
                nesterov=not nesterov,
                adjust_lr_fn=adjust_lr_fn,
                device=device,
            ),
            torch.optim.AdamW(only(is_hidden, wanted=False), lr=learning_rate, foreach=False),
        ]
    assert name == "adamw", name
    return [torch.optim.AdamW(groups, lr=learning_rate, foreach=False)]


def begin_with(
    optimizers: Collection[torch.optim.Optimizer],
    parameter: torch.nn.Parameter,
    moments: Mapping[str, torch.Tensor],
    *,
    num_updates: int,
) -> None:
    """Give the optimizer of the parameter its moments after some updates: `m32` and `v32`, or `m8` and `v8` with the
    scales of their blocks."""
    (optimizer,) = [each for each in optimizers if any(parameter is one for one in _parameters_of(each))]
    state: dict[str, Any] = {"step": num_updates}
    if "m8" in moments:
        state |= {key: (moments[f"{key}8"], moments[f"{key}_scale"]) for key in ("m", "v")}
    elif isinstance(optimizer, torch.optim.Muon):
        state = {"momentum_buffer": moments["m32"].view_as(parameter)}
    else:
        state = {"step": torch.tensor(float(num_updates))}
        names = {"exp_avg": "m32", "exp_avg_sq": "v32"}
        state |= {key: moments[name].view_as(parameter).clone() for key, name in names.items()}
    optimizer.state[parameter] = state


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]
