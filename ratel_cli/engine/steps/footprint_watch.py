"""What the operators of a layer move, and what they leave alive, counted while they run on fake tensors.

Invariant: a storage counts by what divides its bytes: the number of tokens of the row, or its square. All others are
weights and their gradients, which do not count.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry

from ratel_cli.model.values.operators import OperatorMode, TorchOperator, tensors_in

TOKENS = 61


_ATTENTION_NAME = "scaled_dot_product"


_PRODUCTS = frozenset(
    (
        *flop_registry,
        torch.ops.aten._grouped_mm,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
)
"""Operators with FLOPs: those whose results are worth swapping."""


_GATHERS = frozenset(
    (
        torch.ops.aten.embedding,
        torch.ops.aten.gather,
        torch.ops.aten.index,
        torch.ops.aten.index_select,
        torch.ops.aten.nll_loss_forward,
    )
)
"""Operators that read as much as they write, whatever the size of what they read from."""


class MovedWatch(OperatorMode):
    """Counts the bytes that operators other than products read and write, by stage and by what they grow with."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = "forward"
        """What runs now: `forward` or `backward`."""
        self.bytes_of = {stage: {TOKENS: 0, TOKENS**2: 0} for stage in ("forward", "backward")}

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        result = func(*args, **kwargs)
        read, written = tensors_in((args, kwargs)), tensors_in(result)
        packet = getattr(func, "_overloadpacket", None)
        if packet not in _PRODUCTS and (func._schema.is_mutable or _makes_anything(read, written)):
            for tensor in (*(written if packet in _GATHERS else read), *written):
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's elements; those that are the same memory once."""
        elements = zip(tensor.shape, tensor.stride(), strict=True)
        num_bytes = tensor.itemsize * math.prod(size for size, stride in elements if stride)
        for grows_with in (TOKENS**2, TOKENS):
            if num_bytes % grows_with == 0:
                self.bytes_of[self.stage][grows_with] += num_bytes
                return


def _makes_anything(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> bool:
    """Whether there is a result that is no view of an argument."""
    known = {tensor.untyped_storage()._cdata for tensor in read}
    return any(tensor.untyped_storage()._cdata not in known for tensor in written)


@dataclass(slots=True, kw_only=True)
class BackwardPart:
    """Backward from the gradient of one parameter on, to that of the next one or to the end."""

    after: str
    """The parameter's name within the layer."""
    peak: dict[int, int]
    """The most bytes that are alive, by what they grow with."""
    has_attention: bool = False
    """Whether the backward of attention runs."""
    gradients: tuple[str, ...] = ()
    """Parameters whose gradients are made."""


class ActivationWatch(OperatorMode):
    """Counts the bytes of storages that operators allocate and that are alive, by what they grow with."""

    def __init__(self, weights: Sequence[torch.Tensor], *, weight_bytes: int = 0, holds_products: bool = False) -> None:
        """`weights` are flat arrays. A storage of at least `weight_bytes` that does not grow with the tokens is
        the gradient of a weight. `holds_products`: results of products never end."""
        super().__init__()
        self._held: list[torch.Tensor] | None = [] if holds_products else None
        self._parts: list[BackwardPart] = []
        self._weights = {each.untyped_storage()._cdata: number for number, each in enumerate(weights)}
        self._weight_bytes = weight_bytes
        self._num_made = 0
        """Gradients of weights that are alive."""
        self.live = {TOKENS: 0, TOKENS**2: 0}
        """By what divides their bytes: the tokens, or the square of the tokens."""
        self.peak = dict(self.live)
        self.making = dict(self.live)
        """The peak while the gradient of a weight is alive."""
        self.made_with: dict[int, tuple[int, int]] = {}
        """Where the weight begins that each storage that is alive was made with: the number of its array, and its first
        element there."""
        self.rows_of: dict[tuple[int, int], int] = {}
        """By such a place: the rows of what was made."""
        self._events: list[tuple[int, int, int]] = []
        """What began and what ended: a number for each storage, what its bytes grow with, and its bytes, negative at
        its end."""
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def most_that_has_ended(self) -> dict[int, int]:
        """The most bytes that were alive at once of storages that have ended."""
        ended = {number for number, _, num_bytes in self._events if num_bytes < 0}
        live, most = {TOKENS: 0, TOKENS**2: 0}, {TOKENS: 0, TOKENS**2: 0}
        for number, grows_with, num_bytes in self._events:
            if number in ended:
                live[grows_with] += num_bytes
                most[grows_with] = max(most[grows_with], live[grows_with])
        return most

    def begin_part(self, name: str) -> None:
        """Note that the gradient of the parameter with this name was made, and is gone."""
        self._parts.append(BackwardPart(after=name, peak=dict(self.live)))

    def rests(self, least_freed: float) -> list[BackwardPart]:
        """The parts up to the end, each of which takes less than the one before by this share of the peak."""
        rests: list[BackwardPart] = []
        for part in reversed(self._parts):
            later = rests[-1:]
            rest = BackwardPart(
                after=part.after,
                peak={key: max(each.peak[key] for each in (part, *later)) for key in self.peak},
                has_attention=any(each.has_attention for each in (part, *later)),
                gradients=tuple(name for each in later for name in (each.after, *each.gradients)),
            )
            rests.append(rest)
        found, live = [], self.peak[TOKENS]
        for rest in reversed(rests):
            if rest.peak[TOKENS] <= live - least_freed * self.peak[TOKENS]:
                found.append(rest)
                live = rest.peak[TOKENS]
        return found

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        passed = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = _run(func, args, kwargs)
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in passed and storage._cdata not in self._known:
                self._add(storage)
                for each in tensors_in((args, kwargs)):
                    number = self._weights.get(each.untyped_storage()._cdata)
                    if number is not None and storage._cdata in self._known:
                        place = number, int(each.storage_offset())
                        self.made_with[storage._cdata] = place
                        self.rows_of[place] = tensor.shape[:-1].numel()
        if self._parts and _ATTENTION_NAME in str(func):
            self._parts[-1].has_attention = True
            self._note_peak(_attention_workspace_bytes(tensors_in(args)))
        if self._held is not None and getattr(func, "_overloadpacket", None) in _PRODUCTS:
            self._held += tensors_in(result)
        if self._num_made:
            self.making = {key: max(self.making[key], self.live[key]) for key in self.live}
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        grows_with = next((number for number in (TOKENS**2, TOKENS) if num_bytes % number == 0), None)
        if grows_with is None:
            if num_bytes >= self._weight_bytes:
                self._num_made += 1
                self._known[key] = weakref.ref(storage, lambda _: self._end_gradient(key))
            return

        number = len(self._events)
        self._events.append((number, grows_with, num_bytes))

        def end(_: object) -> None:
            self._events.append((number, grows_with, -num_bytes))
            del self._known[key]
            self.made_with.pop(key, None)
            self.live[grows_with] -= num_bytes

        self._known[key] = weakref.ref(storage, end)
        self.live[grows_with] += num_bytes
        self._note_peak()

    def _note_peak(self, workspace_bytes: int = 0) -> None:
        """Note what is alive. `workspace_bytes`: what an operator takes besides, which grows with the tokens."""
        for peak in (self.peak, *(part.peak for part in self._parts[-1:])):
            for key, num_bytes in self.live.items():
                peak[key] = max(peak[key], num_bytes + (workspace_bytes if key == TOKENS else 0))

    def _end_gradient(self, key: int) -> None:
        del self._known[key]
        self._num_made -= 1


def _run(func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """The operator's result. Products of groups of rows (experts) have real kernels for dtypes and sizes for which
    their rule for fake tensors raises an error."""
    if func is not torch.ops.aten._grouped_mm.default:
        return func(*args, **kwargs)
    left, right, *ends = tensors_in((args, kwargs))
    product = (left.shape[-2], right.shape[-1])
    if left.dim() != right.dim():  # the groups are parts of the rows, or of what is summed over
        return left.new_empty(product)
    return left.new_empty((len(ends[0]) if left.dim() == 2 else len(left), *product))


def _attention_workspace_bytes(arguments: Sequence[torch.Tensor]) -> int:
    """What the backward of attention takes on a GPU besides its results, which the CPU's kernel does not: the gradient
    of the queries in fp32, and where heads share keys and values, their gradients for each head."""
    _, query, key, value, *_ = arguments
    expanded = 2 * query.nbytes if key.shape[1] < query.shape[1] or value.shape[1] < query.shape[1] else 0
    return 4 * query.numel() + expanded
