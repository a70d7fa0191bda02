"""Measures what the activations of one layer take in backward, and what its operators move, on the skeleton.

Each kind of layer runs forward and backward once on fake tensors, which have shapes and no values. So it takes no
memory and a fraction of a second, whatever the size of the model. The row has a prime number of tokens that divides no
size of any model. So a storage grows with the tokens if that number divides its bytes, and with the square of them (a
mask, or scores of attention) if its square does. All others are weights and their gradients, which do not count here.

Invariant: a model that fake tensors cannot run is not an error. It has no measured activations, and a plan estimates
them from its shapes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from ratel_cli.engine.reading.program import AnyBatch, AnyProgram, Program, trained_of
from ratel_cli.engine.steps.footprint_watch import TOKENS, ActivationWatch, BackwardPart, MovedWatch
from ratel_cli.io.views import VALUE_DTYPES
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.values.carried import Carried, Embedded
from ratel_cli.model.values.spec import (
    LayerActivations,
    LayerTraits,
    MovedBytes,
    NormActivations,
    RestOfBackward,
    name_in_layer,
)
from ratel_cli.schedule.segments import Segment

_PerToken = TypeVar("_PerToken", LayerActivations, RestOfBackward, NormActivations, MovedBytes)
_CANNOT_RUN = (RuntimeError, TypeError, ValueError, LookupError)
"""What fake tensors raise where values would decide what runs, and models that take fewer tokens."""
_LEAST_FREED = 0.1
"""Least share of backward's peak that is freed from one of `LayerActivations.rests` to the next."""


def measured_traits(program: AnyProgram) -> LayerTraits:
    """The program's traits with what activations take of its layers, the most over all kinds, and of its last segment.

    The program must be on the CPU, with no block bound. It is measured once.
    """
    if program not in _MEASURED:
        with _silent_fake_tensors():
            _MEASURED[program] = _measured_traits(program)
    return _MEASURED[program]


_MEASURED: WeakKeyDictionary[AnyProgram, LayerTraits] = WeakKeyDictionary()


@contextlib.contextmanager
def _silent_fake_tensors() -> Iterator[None]:
    """A context in which torch does not log a traceback where fake tensors cannot run an operator."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _measured_traits(program: Program[AnyBatch]) -> LayerTraits:
    batch = program.sample(TOKENS)
    shared_by = program.spec.sample_tokens or 1
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Values may decide what text a layer sees. Samples that are all of one shape need none.
        with mode if program.spec.sample_tokens else contextlib.nullcontext(), torch.no_grad():
            embedded = program.begin(batch)
        measured = _layers(program, embedded, mode)
        measured = measured[max(0, program.spec.first_trained - 1) :] or measured
        activations = _shared_out(_most([activations for activations, _ in measured]), shared_by)
        activations = replace(activations, rests=tuple(_shared_out(each, shared_by) for each in activations.rests))
        traits = replace(program.traits, activations=activations)
    except _CANNOT_RUN:
        return program.traits
    try:
        norm, head = _last(program, batch, embedded.hidden.shape)
    except _CANNOT_RUN:
        return traits
    moved = _shared_out(_mean([moved for _, moved in measured], head), shared_by)
    return replace(traits, norm=_shared_out(norm, shared_by), moved=moved)


def _shared_out(found: _PerToken, number: int) -> _PerToken:
    """What each of a sample's tokens takes, where `found` is what a sample does: those of a sample are always as many,
    so what grows with their square grows with the samples."""
    names = [each.name for each in fields(found) if each.name.endswith("per_token")]
    return replace(found, **{name: -(-getattr(found, name) // number) for name in names})


def _layers(program: AnyProgram, embedded: Embedded, mode: FakeTensorMode) -> list[tuple[LayerActivations, MovedWatch]]:
    """What every layer takes and moves. Of each kind one is measured. `mode`: in which fake tensors of `embedded` were
    made, if it has some."""
    kinds: dict[object, tuple[LayerActivations, MovedWatch]] = {}
    found = []
    with mode:
        calls = tuple(call.changed(partial(_faked, mode)) for call in embedded.calls)
        extras = tuple(
            tuple(each if each is None else _faked(mode, each) for each in of_layer) for of_layer in embedded.extras
        )
        carried = Carried(replace(embedded, calls=calls, extras=extras))
        for index, layer in enumerate(program.spec.layers):
            kind = (layer.block_kinds, *(each.computed_shape for each in layer.parameters), carried.cost_key(index))
            if kind not in kinds or carried.links_layers:  # layers above may read what this one leaves
                kinds[kind] = _layer(program, layer, carried, embedded.hidden.shape)
            found.append(kinds[kind])
    return found


def _faked(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


def _mean(layers: Sequence[MovedWatch], head: MovedWatch) -> MovedBytes:
    def mean(stage: str, grows_with: int) -> int:
        return sum(each.bytes_of[stage][grows_with] for each in layers) // (grows_with * len(layers))

    return MovedBytes(
        forward_per_token=mean("forward", TOKENS),
        forward_per_pair=mean("forward", TOKENS**2),
        backward_per_token=mean("backward", TOKENS),
        backward_per_pair=mean("backward", TOKENS**2),
        head_per_token=sum(head.bytes_of[stage][TOKENS] for stage in ("forward", "backward")) // TOKENS,
    )


def _most(measured: Sequence[LayerActivations]) -> LayerActivations:
    """The most that any kind of layer takes, and of the names those that every kind has."""
    sizes = [each.name for each in fields(LayerActivations) if each.name.endswith(("_per_token", "_per_pair"))]
    most = {name: max(getattr(layer, name) for layer in measured) for name in sizes}
    products = set.intersection(*(set(layer.saved_products) for layer in measured))
    alike = len({tuple(rest.after for rest in layer.rests) for layer in measured}) == 1
    rests = tuple(map(_most_of_rests, zip(*(layer.rests for layer in measured), strict=True))) if alike else ()
    of_samples = {name for layer in measured for name in layer.of_samples}
    found = replace(measured[0], **most, rests=rests, saved_products=tuple(sorted(products)))
    return replace(found, of_samples=tuple(sorted(of_samples)))


def _most_of_rests(rests: Sequence[RestOfBackward]) -> RestOfBackward:
    """The most that the rest of backward takes, and what every kind of layer computes in it."""
    products = set.intersection(*(set(rest.products) for rest in rests))
    return replace(
        rests[0],
        per_token=max(rest.per_token for rest in rests),
        per_pair=max(rest.per_pair for rest in rests),
        products=tuple(sorted(products)),
        has_attention=all(rest.has_attention for rest in rests),
    )


def _last(program: Program[AnyBatch], batch: AnyBatch, shape: Sequence[int]) -> tuple[NormActivations, MovedWatch]:
    """What is between the last layer and the chunks of the loss, and what both move. `shape`: of hidden states."""
    head, dtype = program.spec.head, DTYPES[program.spec.dtype]
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = _weights(head)
        inputs = trained_of(_bound(program, head, weights))
        try:
            leaf = torch.empty(shape, dtype=dtype, requires_grad=True)
            with ActivationWatch(weights) as watch:
                finished = program.finish(leaf, batch).hidden
                gradient = torch.empty_like(finished)
                held = watch.live[TOKENS]
                torch.autograd.grad(finished, (leaf, *inputs), gradient, allow_unused=True)
            moved = MovedWatch()
            with moved:
                done = program.finish(leaf, batch)
                loss = done.loss_sum(done.hidden, 0)
                moved.stage = "backward"
                torch.autograd.grad(loss, (leaf, *inputs), allow_unused=True)
        finally:
            program.release(head)
    return NormActivations(held_per_token=held // TOKENS, most_per_token=watch.peak[TOKENS] // TOKENS), moved


def _weights(segment: Segment) -> list[torch.Tensor]:
    """Flat arrays for the segment's blocks, with any values."""
    return [torch.empty(block.num_elements, dtype=VALUE_DTYPES[block.dtype]) for block in segment.bound]


def _bound(program: AnyProgram, segment: Segment, weights: Sequence[torch.Tensor]) -> tuple[nn.Parameter, ...]:
    """The segment's parameters as views of these arrays, bound to its modules."""
    bound = map(program.bind, segment.bound, weights)
    return tuple(parameter for of_block in bound for parameter in of_block)


def _layer(
    program: AnyProgram, layer: Segment, carried: Carried, shape: Sequence[int]
) -> tuple[LayerActivations, MovedWatch]:
    """What one layer takes and moves, for hidden states of this shape. `carried` has fake tensors."""
    index = layer.index - 1
    weights = _weights(layer)
    parameters = _bound(program, layer, weights)
    try:
        dtype = DTYPES[program.spec.dtype]
        leaf = torch.empty(tuple(shape), dtype=dtype, requires_grad=True)
        gradient = torch.empty_like(leaf).detach()
        run = partial(program.run, index, leaf)
        with _NoDropoutInAttention(), torch.no_grad():
            with ActivationWatch(weights) as forward:
                carried.forward(index, run)
            with ActivationWatch(weights, holds_products=True) as holding:
                carried.forward(index, run)
        least_bytes = max((parameter.nbytes for parameter in parameters), default=0) // 2
        with (
            _NoDropoutInAttention(),
            MovedWatch() as moved,
            ActivationWatch(weights, weight_bytes=least_bytes) as watch,
        ):
            for each, parameter in zip(layer.parameters, parameters, strict=True):
                if not parameter.requires_grad:
                    continue
                parameter.register_post_accumulate_grad_hook(
                    partial(_forget, then=partial(watch.begin_part, name_in_layer(each.name)))
                )
            output = carried.forward(index, run)
            moved.stage = "backward"
            saved, used, rows_of = dict(watch.live), set(watch.made_with.values()), dict(watch.rows_of)
            replay, passing = dict(watch.peak), watch.most_that_has_ended()
            output.backward(gradient, inputs=[leaf, *trained_of(parameters)])
    finally:
        program.release(layer)
    row, square = TOKENS, TOKENS**2
    saved[row] -= output.untyped_storage().nbytes()
    passing[row] += output.untyped_storage().nbytes()
    matrices = {name_in_layer(each.name) for each in layer.parameters if len(each.shape) > 1}
    return LayerActivations(
        saved_per_token=saved[row] // row,
        saved_per_pair=saved[square] // square,
        more_per_token=(watch.peak[row] - saved[row]) // row,
        more_per_pair=(watch.peak[square] - saved[square]) // square,
        making_per_token=(watch.making[row] - saved[row]) // row,
        making_per_pair=(watch.making[square] - saved[square]) // square,
        replay_per_token=replay[row] // row,
        replay_per_pair=replay[square] // square,
        replay_held_per_token=(saved[row] + passing[row]) // row,
        replay_held_per_pair=(saved[square] + passing[square]) // square,
        forward_per_token=forward.peak[row] // row,
        forward_per_pair=forward.peak[square] // square,
        forward_held_per_token=holding.peak[row] // row,
        forward_held_per_pair=holding.peak[square] // square,
        rests=tuple(
            RestOfBackward(
                after=rest.after,
                per_token=rest.peak[row] // row,
                per_pair=rest.peak[square] // square,
                products=tuple(name for name in rest.gradients if name in matrices and not _is_made_with(name, rest)),
                has_attention=rest.has_attention,
            )
            for rest in watch.rests(_LEAST_FREED)
        ),
        saved_products=tuple(
            name_in_layer(each.name)
            for number, block in enumerate(layer.bound)
            for each in block.parameters
            if len(each.shape) > 1 and (number, each.start) in used
        ),
        of_samples=tuple(
            name_in_layer(each.name)
            for number, block in enumerate(layer.bound)
            for each in block.parameters
            if program.spec.sample_tokens > 1 and rows_of.get((number, each.start)) == TOKENS
        ),
    ), moved


class _NoDropoutInAttention(TorchFunctionMode):
    """Attention without dropout: with it the CPU has no fused kernel. Those of a GPU keep nothing for it."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        keywords = dict(kwargs or {})
        if func is scaled_dot_product_attention and "dropout_p" in keywords:
            keywords["dropout_p"] = 0.0
        return func(*args, **keywords)


def _is_made_with(name: str, rest: BackwardPart) -> bool:
    """Whether a matrix gets its gradient together with the bias after whose gradient the rest begins."""
    return name.removesuffix(".weight") == rest.after.removesuffix(".bias")


def _forget(parameter: torch.Tensor, *, then: Callable[[], None]) -> None:
    """Drop a gradient as soon as it is made, as the engine does."""
    parameter.grad = None
    then()
