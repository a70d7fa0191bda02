"""Batches of tensors, as loops around transformers have them, as the micro-batches of a step.

Invariant: what a batch asks for is done, or rejected by name: nothing in it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ratel_cli.data.packing import MicroBatch
from ratel_cli.errors import BadInput
from ratel_cli.model.decoder import DecoderModel
from ratel_cli.sizes import IGNORED_TARGET

Tensors = Mapping[str, torch.Tensor]
"""`input_ids`, int64 `[batch, tokens]`; of the same shape `labels`, with -100 where there is no loss, by default the
tokens themselves; `attention_mask`, 1 for tokens and 0 for padding, which must come last in each line; `position_ids`.
As with transformers, the label of a token is what the token before it must predict; of a model of masked tokens what it
must itself predict; of a classifier labels are `[batch]`, the class of each line. Both of these need labels."""
_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


def micro_batches(batches: Tensors | Sequence[Tensors], *, model: DecoderModel) -> list[MicroBatch]:
    """One micro-batch for each batch of tensors that are for `model`. Raises BadInput."""
    found = [batches] if isinstance(batches, Mapping) else list(batches)
    if not found:
        raise BadInput("a step needs a batch, or a list of at least one")
    return [_micro_batch(batch, model) for batch in found]


def _micro_batch(batch: Tensors, model: DecoderModel) -> MicroBatch:
    is_causal, classifies = model.task == "causal_lm", model.task == "classification"
    unknown = sorted(batch.keys() - set(_KEYS))
    missing = [name for name in ("input_ids", *([] if is_causal else ["labels"])) if name not in batch]
    if unknown or missing:
        found = f"unknown: {', '.join(map(repr, unknown))}" if unknown else f"{missing[0]!r} is missing"
        raise BadInput(f"a batch has tensors called {', '.join(map(repr, _KEYS))}; {found}")
    tokens = _integers(batch, "input_ids", None)
    if tokens.shape[1] % model.row_multiple:
        chunks = f"but the model computes lines in chunks of {model.row_multiple} tokens"
        raise BadInput(f"'input_ids' is {list(tokens.shape)}, {chunks}", "pad each line to a multiple of that")
    if classifies:
        labels = _classes(batch["labels"], tokens)
    else:
        labels = _integers(batch, "labels", tokens) if "labels" in batch else tokens
    num_tokens, num_labels = model.spec.vocab_size, model.num_outputs
    for name, values, number, ignored in (
        ("input_ids", tokens, num_tokens, 0),
        ("labels", labels, num_labels, IGNORED_TARGET),
    ):
        wrong = values[((values < 0) | (values >= number)) & (values != ignored)]
        if wrong.numel():
            what = "classes" if number is num_labels and classifies else "tokens"
            raise BadInput(f"{name!r} has {int(wrong[0])}, but the model's {what} are 0 to {number - 1}")
    mask = _integers(batch, "attention_mask", tokens) if "attention_mask" in batch else torch.ones_like(tokens)
    if not bool(((mask == 0) | (mask == 1)).all() and (not is_causal or (mask.diff(dim=1) <= 0).all())):
        raise BadInput("'attention_mask' must be 1 for tokens and then 0 for padding, in each line; pad on the right")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    if "position_ids" in batch:
        given = _integers(batch, "position_ids", tokens)
        if not model.layer_runner.takes_positions and not torch.equal(given, positions):
            raise BadInput("the model takes no 'position_ids'; leave them out")
        positions = given
    if is_causal:
        targets = torch.full_like(tokens, IGNORED_TARGET)
        targets[:, :-1] = labels.masked_fill(mask == 0, IGNORED_TARGET)[:, 1:]
    else:
        targets = labels
    return MicroBatch(
        input_ids=tokens,
        targets=targets,
        position_ids=positions,
        mask=None if is_causal else mask,
        sample_ids=(),
        num_targets=int((targets != IGNORED_TARGET).sum()),
        num_tokens=int(mask.sum()),
    )


def _classes(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The class of each line as a target at its first token, int64 `[batch, tokens]` on the CPU."""
    if not isinstance(values, torch.Tensor) or values.is_floating_point() or values.shape != tokens.shape[:1]:
        raise BadInput("'labels' must be a tensor of integers, [batch]: the class of each line")
    targets = torch.full_like(tokens, IGNORED_TARGET)
    targets[:, 0] = values
    return targets


def _integers(batch: Tensors, name: str, like: torch.Tensor | None) -> torch.Tensor:
    """The tensor of that name, int64 on the CPU."""
    values = batch[name]
    if not isinstance(values, torch.Tensor) or values.dim() != 2 or values.is_floating_point() or not values.numel():
        raise BadInput(f"{name!r} must be a tensor of integers, [batch, tokens], with at least one of each")
    if like is not None and values.shape != like.shape:
        raise BadInput(f"{name!r} is {list(values.shape)}, but 'input_ids' is {list(like.shape)}")
    return values.detach().to(device="cpu", dtype=torch.long).contiguous()
