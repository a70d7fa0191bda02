"""The oracle: the same training in plain PyTorch, with the whole model in memory.

Master weights in fp32, updated by `torch.optim.AdamW` or another optimizer of the recipe; the model computes with a
copy in the compute dtype; gradients of the step's micro-batches are summed in fp32, rounded once to the gradient
dtype, clipped by `clip_grad_norm_`.

Invariant: it imports nothing from `ratel_cli`. What Ratel promises is written here a second time, the rule that
seeds each draw included; `tests/test_oracles.py` holds this.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import torch
import xxhash
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Trainer
from transformers.integrations.neftune import activate_neftune

from tests.kernels.rules import random_halves, rounded_stochastically
from tests.reference_optimizers import begin_with, optimizers_of


class Batch(Protocol):
    """One micro-batch: int64 tensors `[batch, tokens]`; targets are shifted already, -100 is ignored."""

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def targets(self) -> torch.Tensor: ...
    @property
    def position_ids(self) -> torch.Tensor: ...
    @property
    def num_targets(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A training after some steps. Its weights are given as those of any other."""

    step: int
    num_updates: int
    """Steps that were applied: all but those that overflowed."""
    moments: Mapping[str, Mapping[str, torch.Tensor]]
    """By parameter and the name of the moment: see `begin_with` of `tests/reference_optimizers.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype | None = None
    optimizer: str = "adamw"
    momentum: float = 0.0
    """Of `sgd`, and of `muon` unless it is 0, which is its default there."""
    nesterov: bool = False
    """Of `sgd`; `muon` has it unless this is set."""
    adjust_lr_fn: str = "match_rms_adamw"
    """Of `muon`."""
    bf16_master: str = "fp32"
    """`stochastic`: weights in bf16 are their own masters, rounded stochastically after each update, by `seed`."""
    learning_rate: float = 1e-3
    group_rates: tuple[tuple[str, float], ...] = ()
    """Regular expressions, each with the learning rate of the parameters whose names have it; the first one counts."""
    never_decayed: str | None = None
    """A regular expression for parameters that do not decay."""
    learning_rates: tuple[float, ...] | None = None
    """One for each step; None: `learning_rate` for all."""
    weight_decay: float = 0.1
    max_grad_norm: float | None = None
    seed: int = 42
    attn_implementation: str = "sdpa"
    token_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """From fp32 logits `[tokens, vocabulary]` and targets to the sum of the losses; None: the cross-entropy."""
    noise_alpha: float | None = None
    """Of NEFTune, which transformers adds to the model."""
    chunk_tokens: int | None = None
    loss_scale: float = 1.0
    fresh: bool = False
    """Whether each micro-batch goes through a copy of the model that has not run yet."""
    unfrozen: tuple[str, ...] | None = None
    """How the names of the parameters begin that are trained; None: all that the model's own code has not frozen."""
    lora: tuple[tuple[str, object], ...] | None = None
    """Of `peft.LoraConfig`, each with its name: an adapter is trained, which `seed` draws. None: the model is."""
    kept: frozenset[str] = frozenset()
    """Parameters and buffers that stay in fp32 in a 16-bit model: see `kept_in_fp32`."""
    device: str = "cpu"
    """Where the model computes; masters and AdamW are on the CPU."""
    model_class: type[PreTrainedModel] | None = None
    """None: transformers' class of causal language models."""
    of_rank: int | None = None
    """So many micro-batches of a step, one after another, have a sum of their own; these are then added. The last of
    them may have fewer. None: all are one sum."""
    begun: Begun | None = field(default=None, hash=False)
    """What training goes on from; None: it begins."""
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)
    """By parameter: where ranks' slices cut it. Each part of a gradient has a norm of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    parameter_norms: tuple[dict[str, float], ...]
    """Of each step: the norm of each parameter's gradient, before it is clipped."""
    weights: dict[str, torch.Tensor]
    """By name: fp32 masters; what is frozen as the model has it."""
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By the name of what has had a gradient: the state of torch's AdamW."""


def train_in_memory(
    config: PretrainedConfig,
    weights: dict[str, torch.Tensor],
    steps: Sequence[Sequence[Batch]],
    recipe: Recipe,
    buffers: dict[str, torch.Tensor] | None = None,
) -> Trained:
    """`buffers`: those of a checkpoint, where they are not what the configuration gives."""
    model = loaded_model(config, recipe.dtype, recipe.attn_implementation, recipe.model_class or AutoModelForCausalLM)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in recipe.kept:
            tensor.data = tensor.data.float()
    model.load_state_dict(buffers or {}, strict=False)
    model.to(recipe.device).train()
    model.tie_weights()  # on devices that torch does not know, `to` separates tied weights
    if recipe.lora is not None:
        model, weights, recipe = _with_adapter(model, weights, recipe)
    if recipe.noise_alpha is not None:
        activate_neftune(model, recipe.noise_alpha)
    for name, parameter in model.named_parameters():
        if recipe.unfrozen is not None and not name.startswith(recipe.unfrozen):
            parameter.requires_grad_(False)
    # The method does not look at its Trainer, which would need a whole training setup.
    names = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]

    def gradients(step: int) -> tuple[float, dict[str, torch.Tensor]]:
        return _gradients(model, [_placed(batch, recipe.device) for batch in steps[step]], step, recipe)

    trained = _trained(model, weights, len(steps), recipe, names, gradients)
    # Of what PEFT copies and trains, the copies are the model's.
    kept = {name: each for name, each in trained.weights.items() if ".original_module." not in name}
    return replace(trained, weights={name.replace(".modules_to_save.default", ""): each for name, each in kept.items()})


def loaded_model(
    config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str | None, model_class: type[Any]
) -> PreTrainedModel:
    """A model with random weights as users have it: loaded from files. `from_config` computes buffers otherwise.

    Its weights are copies: a mapped file gives tensors at addresses at which some kernels round otherwise.
    """
    build = model_class._from_config if issubclass(model_class, PreTrainedModel) else model_class.from_config
    with TemporaryDirectory() as directory:
        made = build(copy.deepcopy(config), dtype=torch.float32)
        # Copies: transformers refuses to save layers that share weights.
        made.save_pretrained(directory, state_dict={name: each.clone() for name, each in made.state_dict().items()})
        model = model_class.from_pretrained(directory, dtype=dtype, attn_implementation=attn_implementation)
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.data = tensor.data.clone()
    for name, parameter in made.named_parameters():  # from_pretrained forgets what the class has frozen
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    assert isinstance(model, PreTrainedModel)
    return model.train()


def _with_adapter(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], recipe: Recipe
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], Recipe]:
    """The model as PEFT makes it, with all weights by their names there. Adapters are in fp32."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in recipe.lora or ()}
    config = LoraConfig(**given)  # type: ignore[arg-type]
    torch.manual_seed(recipe.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks for what transformers calls otherwise now, and sets what it must
        inner = get_peft_model(model, config).base_model.model
    adapters = {name: each for name, each in inner.named_parameters() if re.search("lora_|trainable_tokens_", name)}
    assert all(each.dtype == torch.float32 and each.requires_grad for each in adapters.values())
    found = {
        name: each.detach().cpu().clone()
        if name in adapters and recipe.begun is None
        else weights[name if name in adapters else _PEFTS_WORDS.sub("", name)]
        for name, each in inner.named_parameters()
    }
    return inner.train(), found, replace(recipe, kept=recipe.kept | adapters.keys())


_PEFTS_WORDS = re.compile(r"\.(base_layer|token_adapter|original_module|modules_to_save\.default)\b")


class AnyBatch(Protocol):
    """One micro-batch of any model."""

    @property
    def num_targets(self) -> int: ...


_Batch = TypeVar("_Batch", bound=AnyBatch)


def train_module(
    model: nn.Module,
    loss_sum: Callable[[_Batch], torch.Tensor],
    weights: dict[str, torch.Tensor],
    steps: Sequence[Sequence[_Batch]],
    recipe: Recipe,
    *,
    decayed: Collection[str],
    stacks: Sequence[tuple[nn.Module, Sequence[nn.Module]]] = (),
) -> Trained:
    """Any module in the dtype of the recipe. `loss_sum`: the sum of the losses of one micro-batch, which is on the
    device, by the model's own forward. `stacks`: the layers of a model that draws, and the module around them; of an
    encoder-decoder, first those of the encoder."""
    model.to(recipe.device)

    def gradients(step: int) -> tuple[float, dict[str, torch.Tensor]]:
        total, sums = 0.0, dict[str, torch.Tensor]()
        num_targets = sum(batch.num_targets for batch in steps[step])
        for position, batch in enumerate(steps[step]):
            model.zero_grad(set_to_none=True)
            with _Seeding(stacks, recipe.seed, step, position) if stacks else nullcontext():
                loss = loss_sum(batch)
            (loss / num_targets if recipe.loss_scale == 1.0 else loss / num_targets * recipe.loss_scale).backward()
            total += float(loss.detach())
            _collect(model, sums)
        return total / num_targets, sums

    return _trained(model, weights, len(steps), recipe, decayed, gradients)


def _trained(
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    num_steps: int,
    recipe: Recipe,
    decayed_names: Collection[str],
    gradients_of: Callable[[int], tuple[float, dict[str, torch.Tensor]]],
) -> Trained:
    """`gradients_of`: the loss of a step, and the fp32 sums of its gradients."""
    masters = {
        name: nn.Parameter(weights[name].clone().float(), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    rounded = {
        name: master
        for name, master in masters.items()
        if recipe.bf16_master == "stochastic" and recipe.dtype == torch.bfloat16 and name not in recipe.kept
    }
    for master in rounded.values():
        master.data = master.data.bfloat16().float()
    _copy_down(model, masters)
    trained = {name: master for name, master in masters.items() if master.requires_grad}
    groups = [
        {
            "params": [master],
            "weight_decay": recipe.weight_decay if _decays(name, decayed_names, recipe) else 0.0,
            "lr": next((rate for found, rate in recipe.group_rates if re.search(found, name)), recipe.learning_rate),
        }
        for name, master in trained.items()
    ]
    looked_up = [f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Embedding)]
    optimizers = optimizers_of(
        recipe.optimizer,
        groups,
        learning_rate=recipe.learning_rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        adjust_lr_fn=recipe.adjust_lr_fn,
        embeddings=[trained[name] for name in looked_up if name in trained],
        others=[each for name, each in trained.items() if not re.search(r"\.\d+\..*\.weight$", name)],
        device=recipe.device,
    )
    losses, norms, parameter_norms = [], [], []
    begun = recipe.begun or Begun(step=0, num_updates=0, moments={})
    for name, moments in begun.moments.items():
        begin_with(optimizers, trained[name], moments, num_updates=begun.num_updates)
    for step in range(begun.step, num_steps):
        loss, sums = gradients_of(step)
        dtypes = dict.fromkeys(masters, recipe.gradient_dtype or recipe.dtype) | dict.fromkeys(
            recipe.kept, torch.float32
        )
        gradients = {
            name: sums[name].to(dtypes[name]).float() * (1.0 / recipe.loss_scale) for name in masters if name in sums
        }
        parameter_norms.append({name: float(gradient.norm()) for name, gradient in gradients.items()})
        parts = [part for name, gradient in gradients.items() for part in _parts(gradient, recipe.cuts.get(name, ()))]
        norm = _clip(parts, recipe.max_grad_norm)
        if recipe.learning_rates is not None:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = recipe.learning_rates[step]
        for name, master in masters.items():
            master.grad = gradients[name].cpu() if name in gradients else None
        for optimizer in optimizers:
            optimizer.step()
        for name, master in rounded.items():
            if master.grad is not None:
                _round_stochastically(master, f"{recipe.seed}/{step + 1}/{name}")
        _copy_down(model, masters)
        losses.append(loss)
        norms.append(norm)
    return Trained(
        losses=tuple(losses),
        norms=tuple(norms),
        parameter_norms=tuple(parameter_norms),
        weights={
            name: (masters[name] if parameter.requires_grad else parameter).detach().float().cpu().clone()
            for name, parameter in model.named_parameters()
        },
        moments={
            name: {key: each.clone() for key, each in optimizer.state[master].items()}
            for optimizer in optimizers[recipe.optimizer != "adamw" :]  # the state of torch's AdamW alone
            for name, master in trained.items()
            if master in optimizer.state
        },
    )


def _round_stochastically(master: torch.Tensor, key: str) -> None:
    flat = master.detach().view(-1)
    random = random_halves(xxhash.xxh3_64_intdigest(key.encode()), torch.arange(flat.numel()))
    flat.copy_(rounded_stochastically(flat, random))


def _decays(name: str, decayed_names: Collection[str], recipe: Recipe) -> bool:
    never = recipe.never_decayed is not None and re.search(recipe.never_decayed, name)
    return name in decayed_names and not never


def kept_in_fp32(config: PretrainedConfig, dtype: torch.dtype, directory: Path) -> frozenset[str]:
    """The parameters and buffers that transformers has in fp32 when it loads a model in `dtype`. Writes to
    `directory`."""
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    return frozenset(name for name, tensor in loaded.state_dict().items() if tensor.dtype == torch.float32 != dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    num_targets: int


def _placed(batch: Batch, device: str) -> Batch:
    return _Placed(
        input_ids=batch.input_ids.to(device),
        targets=batch.targets.to(device),
        position_ids=batch.position_ids.to(device),
        num_targets=batch.num_targets,
    )


def _parts(gradient: torch.Tensor, cuts: Sequence[int]) -> Iterable[torch.Tensor]:
    """Views of the parts."""
    return gradient.view(-1).tensor_split(list(cuts)) if cuts else [gradient]


def _clip(gradients: list[torch.Tensor], max_norm: float | None) -> float:
    """In place, as torch does. Returns the norm before."""
    if max_norm is None:
        return float(nn.utils.get_total_norm(gradients))
    holders = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    for holder, gradient in zip(holders, gradients, strict=True):
        holder.grad = gradient
    return float(nn.utils.clip_grad_norm_(holders, max_norm))


def _gradients(
    model: nn.Module, batches: Sequence[Batch], step: int, recipe: Recipe
) -> tuple[float, dict[str, torch.Tensor]]:
    num_targets, number = sum(batch.num_targets for batch in batches), recipe.of_rank or len(batches)
    total, sums = 0.0, dict[str, torch.Tensor]()
    for first in range(0, len(batches), number):
        of_rank, sums_of_rank = _gradients_of_rank(model, batches, first, first + number, num_targets, step, recipe)
        total += of_rank
        for name, gradient in sums_of_rank.items():
            sums[name] = sums[name] + gradient if name in sums else gradient
    return total / num_targets, sums


def _gradients_of_rank(
    model: nn.Module,
    batches: Sequence[Batch],
    first: int,
    stop: int,
    num_targets: int,
    step: int,
    recipe: Recipe,
) -> tuple[float, dict[str, torch.Tensor]]:
    """The sum of the losses of batches `first` to `stop`, and the fp32 sums of their gradients."""
    total = 0.0
    sums: dict[str, torch.Tensor] = {}
    original = model
    for position, batch in list(enumerate(batches))[first:stop]:
        model = copy.deepcopy(original) if recipe.fresh else original
        model.zero_grad(set_to_none=True)
        if recipe.chunk_tokens is not None:
            total += _chunked_backward(model, batch, num_targets, recipe.chunk_tokens, sums)
            _collect(model, sums)
            continue
        with _Seeding([(model, _layers_of(model))], recipe.seed, step, position):
            keywords = {"position_ids": batch.position_ids} if _is_packed(batch) and _takes_positions(model) else {}
            logits = model(input_ids=batch.input_ids, use_cache=False, **keywords).logits
        flat, targets = logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1)
        if recipe.token_loss is None:
            cross_entropy = nn.functional.cross_entropy(flat.float(), targets, ignore_index=-100, reduction="sum")
        else:
            cross_entropy = recipe.token_loss(flat.float(), targets)
        loss = cross_entropy / num_targets
        if recipe.loss_scale != 1.0:
            loss = loss * recipe.loss_scale
        loss.backward()
        total += float(cross_entropy.detach())
        _collect(model, sums)
    return total, sums


def _collect(model: nn.Module, sums: dict[str, torch.Tensor]) -> None:
    """Add every gradient to its fp32 sum."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            sums[name] = sums[name] + parameter.grad.float() if name in sums else parameter.grad.float()


def _chunked_backward(
    model: nn.Module, batch: Batch, num_targets: int, chunk_tokens: int, sums: dict[str, torch.Tensor]
) -> float:
    """The head and the loss a chunk of tokens at a time, by hand; only for untied models with a bare head."""
    head = model.get_output_embeddings()
    hidden = model.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).last_hidden_state
    flat, targets = hidden.detach().reshape(1, -1, hidden.shape[-1]), batch.targets.reshape(-1)
    gradient = torch.empty_like(flat)
    total = 0.0
    for start in range(0, flat.shape[1], chunk_tokens):
        chunk = flat[:, start : start + chunk_tokens].requires_grad_()
        logits = head(chunk)[0].float()
        loss = nn.functional.cross_entropy(
            logits, targets[start : start + chunk_tokens], ignore_index=-100, reduction="sum"
        )
        (loss / num_targets).backward()
        gradient[:, start : start + chunk_tokens] = chunk.grad
        total += float(loss.detach())
        _collect(model, sums)
        head.weight.grad = None
    hidden.backward(gradient.view_as(hidden))
    return total


def seed_of_draws(seed: int, *, step: int, block: int, micro_batch: int) -> int:
    """The seed that is promised for one block on one micro-batch of one step.

    The first 8 bytes of BLAKE2b over "seed/step/block/micro_batch", as a little-endian number, without its last bit.
    """
    digest = hashlib.blake2b("/".join(map(str, (seed, step, block, micro_batch))).encode("ascii"), digest_size=8)
    return sum(byte << (8 * place) for place, byte in enumerate(digest.digest())) // 2


_OF_OTHERS = re.compile("image|vision|visual|audio")
"""Parts of a model that text does not use."""


class _Seeding:
    """Seeds torch where part i of Ratel's step begins to draw: at the start, before each layer, and behind the last.

    Of two stacks, what is between them is a part, too. What the second one has before its layers goes on where the
    first part ended: it belongs to that.
    """

    def __init__(
        self, stacks: Sequence[tuple[nn.Module, Sequence[nn.Module]]], seed: int, step: int, micro_batch: int
    ) -> None:
        self._seed, self._step, self._micro_batch = seed, step, micro_batch
        self._stacks = stacks
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._states: list[torch.Tensor] = []
        """Of the generator, behind the first part."""

    def __enter__(self) -> None:
        self._begin(0)
        self._handles.append(self._stacks[0][1][0].register_forward_pre_hook(self._end_first))
        part = 0
        for number, (around, layers) in enumerate(self._stacks):
            if number:
                self._handles.append(around.register_forward_pre_hook(self._go_on))
            for layer in layers:
                part += 1
                self._handles.append(layer.register_forward_pre_hook(self._hook(part)))
            part += 1
            self._handles.append(layers[-1].register_forward_hook(self._hook(part)))

    def __exit__(self, *ignored: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _end_first(self, *_: object) -> None:
        self._states.append(torch.get_rng_state())

    def _go_on(self, *_: object) -> None:
        torch.set_rng_state(self._states[0])

    def _hook(self, part: int) -> Callable[..., None]:
        return lambda *_: self._begin(part)

    def _begin(self, part: int) -> None:
        torch.manual_seed(seed_of_draws(self._seed, step=self._step, block=part, micro_batch=self._micro_batch))


def _layers_of(model: nn.Module) -> nn.ModuleList:
    return max(
        (m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and not _OF_OTHERS.search(name)),
        key=lambda m: sum(p.numel() for p in m.parameters()),
    )


def _copy_down(model: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(masters[name])


def _is_packed(batch: Batch) -> bool:
    """Whether a row has several samples. Otherwise the model's code counts positions by itself."""
    return not torch.equal(
        batch.position_ids,
        torch.arange(batch.position_ids.shape[1], device=batch.position_ids.device).expand_as(batch.position_ids),
    )


def _takes_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters
