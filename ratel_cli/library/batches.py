"""Batches of tensors, as loops around transformers have them, as the micro-batches of a step.

Invariant: what a batch asks for is done, or rejected by name: nothing in it is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

import torch

from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.data.samples.sample_batch import AnyModelBatch, SampleBatch
from ratel_cli.errors import BadInput
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.cut.stack import StackModel
from ratel_cli.sizes import IGNORED_TARGET

Tensors = Mapping[str, torch.Tensor]
"""`input_ids`, int64 `[batch, tokens]`; of the same shape `labels`, with -100 where there is no loss, by default the
tokens themselves; `attention_mask`, 1 for tokens and 0 for padding, which must come last in each line; `position_ids`.
As with transformers, the label of a token is what the token before it must predict. Other tasks need labels: of masked
tokens what each must itself predict; of a classifier `[batch]`, the class of each line; of an encoder-decoder `[batch,
target tokens]`, and `decoder_input_ids` of the same shape are by default the labels, moved on by one.

Of a module: what its forward gets by name, and whatever its loss needs besides, each `[samples, ..]`."""
_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


def micro_batches(batches: Tensors | Sequence[Tensors], *, model: DecoderModel) -> list[AnyModelBatch]:
    """One micro-batch for each batch of tensors that are for `model`. Raises BadInput."""
    return [_micro_batch(batch, model) for batch in _several(batches)]


def _several(batches: Tensors | Sequence[Tensors]) -> list[Tensors]:
    is_one = isinstance(batches, Mapping | torch.Tensor) or not isinstance(batches, Iterable)
    given: list[object] = [batches] if is_one else list(batches)
    if not given:
        raise BadInput("a step needs a batch, or a list of at least one")
    found = [each for each in given if isinstance(each, Mapping)]
    if len(found) < len(given):
        wrong = next(each for each in given if not isinstance(each, Mapping))
        raise BadInput(f"a batch must be a mapping from names to tensors, not {type(wrong).__name__}")
    return found


def _is_dense(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor with a value at each of its places."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout == torch.strided and not (value.is_nested or value.is_meta or value.is_quantized)


def _micro_batch(batch: Tensors, model: DecoderModel) -> MicroBatch:
    is_causal = model.task == "causal_lm"
    names = (*_KEYS, "decoder_input_ids") if model.task == "seq2seq" else _KEYS
    unknown = sorted(batch.keys() - set(names))
    missing = [name for name in ("input_ids", *([] if is_causal else ["labels"])) if name not in batch]
    if unknown or missing:
        found = f"unknown: {', '.join(map(repr, unknown))}" if unknown else f"{missing[0]!r} is missing"
        raise BadInput(f"a batch has tensors called {', '.join(map(repr, names))}; {found}")
    tokens = _integers(batch, "input_ids", None)
    if tokens.shape[1] % model.row_multiple:
        chunks = f"but the model computes lines in chunks of {model.row_multiple} tokens"
        raise BadInput(f"'input_ids' is {list(tokens.shape)}, {chunks}", "pad each line to a multiple of that")
    _check_values("input_ids", tokens, model.spec.vocab_size)
    mask = _integers(batch, "attention_mask", tokens) if "attention_mask" in batch else torch.ones_like(tokens)
    if not bool(((mask == 0) | (mask == 1)).all() and (not is_causal or (mask.diff(dim=1) <= 0).all())):
        raise BadInput("'attention_mask' must be 1 for tokens and then 0 for padding, in each line; pad on the right")
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    if "position_ids" in batch:
        given = _integers(batch, "position_ids", tokens)
        if not model.layer_runner.takes_positions and not torch.equal(given, positions):
            raise BadInput("the model takes no 'position_ids'; leave them out")
        positions = given
    targets = _targets(batch, tokens, mask, model)
    return MicroBatch(
        input_ids=tokens,
        targets=targets,
        position_ids=positions,
        gives_positions="position_ids" in batch,
        mask=None if is_causal else mask,
        is_pair=model.task == "seq2seq",
        decoder_ids=_decoder_ids(batch, targets, model),
        sample_ids=(),
        num_targets=int((targets != IGNORED_TARGET).sum()),
        num_tokens=int(mask.sum()),
    )


def example_of(sample: Tensors) -> SampleBatch:
    """What a module gets, by name, of some samples. Raises BadInput."""
    return SampleBatch(inputs=_samples(sample, "sample", sample))


def sample_batches(batches: Tensors | Sequence[Tensors], *, model: StackModel) -> list[AnyModelBatch]:
    """One micro-batch for each batch of samples: what the module gets, shaped as in its example, and what the loss gets
    besides. Raises BadInput."""
    return [_sample_batch(batch, model) for batch in _several(batches)]


def _sample_batch(batch: Tensors, model: StackModel) -> SampleBatch:
    wanted = model.example.inputs
    missing = next((name for name in wanted if name not in batch), None)
    if missing is not None:
        names = ", ".join(map(repr, wanted))
        raise BadInput(f"a batch has tensors called {names}, as the sample; {missing!r} is missing")
    tensors = _samples(batch, "a batch", wanted)
    for name, like in wanted.items():
        given = tensors[name]
        if (given.shape[1:], given.dtype) != (like.shape[1:], like.dtype):
            raise BadInput(
                f"{name!r} is {given.dtype} {list(given.shape)}, but the sample's is {like.dtype} {list(like.shape)}",
                "give all samples one shape and dtype; only their number may differ",
            )
    return replace(
        model.example,
        inputs={name: tensors[name] for name in wanted},
        targets={name: each for name, each in tensors.items() if name not in wanted},
    )


def _samples(tensors: Tensors, what: str, wanted: Tensors) -> dict[str, torch.Tensor]:
    """The tensors on the CPU, all of which have a row for each sample."""
    wrong = next((name for name, each in tensors.items() if not _is_dense(each) or not each.dim()), None)
    if not tensors or wrong is not None:
        found = f"{wrong!r} is not a dense tensor of such a shape" if tensors else "it is empty"
        raise BadInput(f"{what} must be a mapping of tensors [samples, ..]; {found}")
    first = next(iter(wanted))
    number = len(tensors[first])
    for name, each in tensors.items():
        if len(each) != number or not number:
            raise BadInput(f"{name!r} is {list(each.shape)}, but {what} must have at least one row for each sample")
    return {name: _apart(each) for name, each in tensors.items()}


def _targets(batch: Tensors, tokens: torch.Tensor, mask: torch.Tensor, model: DecoderModel) -> torch.Tensor:
    """What each output is compared with: `[batch, tokens]`, of an encoder-decoder `[batch, target tokens]`."""
    if model.task == "classification":
        labels = _classes(batch["labels"], tokens)
    elif model.task == "seq2seq":
        labels = _integers(batch, "labels", None)
    else:
        labels = _integers(batch, "labels", tokens) if "labels" in batch else tokens
    _check_values("labels", labels, model.num_outputs, "classes" if model.task == "classification" else "tokens")
    if len(labels) != len(tokens):
        raise BadInput(f"'labels' has {len(labels)} lines, but 'input_ids' has {len(tokens)}")
    if model.task != "causal_lm":
        return labels
    targets = torch.full_like(tokens, IGNORED_TARGET)
    targets[:, :-1] = labels.masked_fill(mask == 0, IGNORED_TARGET)[:, 1:]
    return targets


def _decoder_ids(batch: Tensors, labels: torch.Tensor, model: DecoderModel) -> torch.Tensor | None:
    """What the decoder gets, if the batch says it; None: what the model makes of the labels."""
    if "decoder_input_ids" not in batch:
        return None
    given = _integers(batch, "decoder_input_ids", labels, "labels")
    _check_values("decoder_input_ids", given, model.spec.vocab_size)
    return given


def _check_values(name: str, values: torch.Tensor, number: int, what: str = "tokens") -> None:
    ignored = IGNORED_TARGET if name == "labels" else 0
    wrong = values[((values < 0) | (values >= number)) & (values != ignored)]
    if wrong.numel():
        raise BadInput(f"{name!r} has {int(wrong[0])}, but the model's {what} are 0 to {number - 1}")


def _classes(values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The class of each line as a target at its first token, int64 `[batch, tokens]` on the CPU."""
    if not _is_dense(values) or values.is_floating_point() or values.shape != tokens.shape[:1]:
        raise BadInput("'labels' must be a dense tensor of integers, [batch]: the class of each line")
    targets = torch.full_like(tokens, IGNORED_TARGET)
    targets[:, 0] = values
    return targets


def _integers(batch: Tensors, name: str, like: torch.Tensor | None, of: str = "input_ids") -> torch.Tensor:
    """The tensor of that name, int64 on the CPU."""
    values = batch[name]
    if not _is_dense(values) or values.dim() != 2 or values.is_floating_point() or not values.numel():
        raise BadInput(f"{name!r} must be a dense tensor of integers, [batch, tokens], with at least one of each")
    if like is not None and values.shape != like.shape:
        raise BadInput(f"{name!r} is {list(values.shape)}, but {of!r} is {list(like.shape)}")
    return _apart(values).to(torch.long).contiguous()


def _apart(values: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, without the graph that it is from. One of `torch.inference_mode` cannot be in another."""
    return (values.clone() if values.is_inference() else values.detach()).to("cpu")
