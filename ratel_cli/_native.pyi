"""The compiled kernels (kernels/): AdamW in one fused pass, and what measures and tests it.

Called by engine and hardware (`update_*`, square roots), model.import_weights and model.export_weights (split and
join); `adamw_*` and `stream_*` are what benchmarks and tests hold those against. Every array is 1-D, contiguous, on
the CPU and detached: a torch tensor (through DLPack) or a numpy array. Arrays are changed in place, may not overlap,
and have one length. Wrong types raise TypeError; wrong devices, shapes, lengths, names and overlaps raise ValueError;
nothing has been written then. The GIL is released.

`isa` names the instruction set ("baseline", "avx2", "avx512"); None is RATEL_FORCE_ISA if set, else the widest
the processor runs. All give the same bits. `square_root` says how AdamW's square root is rounded: "correct",
"mkl_avx512" (as torch's MKL does on Intel's AVX-512 processors) or "mkl_sse" (as it does on AMD's; x86 only); None is
native_square_root().

bf16 layout: the fp32 master is hi16 (the bf16 weight, rounded to nearest even) and lo16 (its low half). Where
lo16 is 0x8000, a tie, the sign of v32 is set if hi16 was rounded up; v itself is never negative.
"""

from collections.abc import Sequence
from typing import Literal, NotRequired, Protocol, TypeAlias, TypedDict, Unpack

_SquareRoot: TypeAlias = Literal["correct", "mkl_avx512", "mkl_sse"]

class _Array(Protocol):
    """What torch tensors and numpy arrays have in common."""

    def __dlpack_device__(self) -> tuple[int, int]: ...

class _Scalars(TypedDict):
    """Keyword arguments of every update: the numbers of the step, how to round, and which instruction set."""

    decay_factor: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    step_size: float
    bias_correction2_sqrt: float
    epsilon: float
    gradient_scale: float
    square_root: NotRequired[_SquareRoot | None]
    isa: NotRequired[str | None]

def adamw_bfloat16(
    hi16: _Array,
    lo16: _Array,
    m32: _Array,
    v32: _Array,
    gradient: _Array,
    **scalars: Unpack[_Scalars],
) -> None:
    """One AdamW update of bf16 weights. The gradient may be bfloat16, float16 or float32.

    The bits are those of torch.optim.AdamW(foreach=False, fused=False) on fp32 tensors, with
    decay_factor = 1 - lr * weight_decay, step_size = lr / (1 - beta1**t) and bias_correction2_sqrt =
    (1 - beta2**t) ** 0.5. The gradient is multiplied by gradient_scale first. A NaN comes out as 0x7fc00000.
    """

def adamw_float32(
    w32: _Array,
    m32: _Array,
    v32: _Array,
    gradient: _Array,
    **scalars: Unpack[_Scalars],
) -> None:
    """One AdamW update of fp32 weights; see adamw_bfloat16."""

def adamw_float16(
    w16: _Array,
    w32: _Array,
    m32: _Array,
    v32: _Array,
    gradient: _Array,
    **scalars: Unpack[_Scalars],
) -> None:
    """One AdamW update of the fp32 master, then w16 = its fp16 copy; w16 is only written. See adamw_bfloat16."""

def update_bfloat16(
    hi16: _Array,
    lo16: _Array,
    m32: _Array,
    v32: _Array,
    gradient: _Array,
    *,
    segments: Sequence[tuple[int, int, bool]],
    chunk_elements: int,
    seeds_before: Sequence[int | None],
    seeds_after: Sequence[int | None],
    **scalars: Unpack[_Scalars],
) -> tuple[list[int | None], list[int | None]]:
    """adamw_bfloat16 on segments of the arrays: (first, last, whether decay_factor applies), in order; and checksums.

    A chunk is `chunk_elements` of the arrays (a multiple of 512), the last one what is left. For each chunk, and in it
    for each field in the order above, `seeds_before` and `seeds_after` have the seed of a checksum to take before or
    after the update, or None; an empty list wants none. Returns the checksums in the same order: XXH3-64 of the field's
    bytes in the chunk, as xxhash.xxh3_64_intdigest computes it. Arrays with checksums have a multiple of 512 elements.
    """

def update_float32(
    w32: _Array,
    m32: _Array,
    v32: _Array,
    gradient: _Array,
    *,
    segments: Sequence[tuple[int, int, bool]],
    chunk_elements: int,
    seeds_before: Sequence[int | None],
    seeds_after: Sequence[int | None],
    **scalars: Unpack[_Scalars],
) -> tuple[list[int | None], list[int | None]]:
    """adamw_float32 on segments, with checksums; see update_bfloat16."""

def update_float16(
    w16: _Array,
    w32: _Array,
    m32: _Array,
    v32: _Array,
    gradient: _Array,
    *,
    segments: Sequence[tuple[int, int, bool]],
    chunk_elements: int,
    seeds_before: Sequence[int | None],
    seeds_after: Sequence[int | None],
    **scalars: Unpack[_Scalars],
) -> tuple[list[int | None], list[int | None]]:
    """adamw_float16 on segments, with checksums; see update_bfloat16."""

def stream_bfloat16(
    hi16: _Array, lo16: _Array, m32: _Array, v32: _Array, gradient: _Array, *, isa: str | None = None
) -> None:
    """The loads and stores of adamw_bfloat16, with next to no arithmetic: the limit that memory sets.

    Flips bits by the gradient's, so that a second call restores the arrays.
    """

def stream_float32(w32: _Array, m32: _Array, v32: _Array, gradient: _Array, *, isa: str | None = None) -> None:
    """The loads and stores of adamw_float32; see stream_bfloat16."""

def stream_float16(
    w16: _Array, w32: _Array, m32: _Array, v32: _Array, gradient: _Array, *, isa: str | None = None
) -> None:
    """The loads and stores of adamw_float16; see stream_bfloat16. w16 is overwritten."""

def split_bfloat16(w32: _Array, hi16: _Array, lo16: _Array, v32: _Array, *, isa: str | None = None) -> None:
    """Write the halves of w32 and the sign of v32; v32's other bits stay. Lossless for all 2**32 patterns."""

def join_bfloat16(hi16: _Array, lo16: _Array, v32: _Array, w32: _Array, *, isa: str | None = None) -> None:
    """Write w32, the master that split_bfloat16 was given."""

def square_root(values: _Array, *, square_root: _SquareRoot | None = None, isa: str | None = None) -> None:
    """Replace float32 values by their square roots, as the AdamW kernels compute them."""

def native_square_root() -> _SquareRoot:
    """The rounding that torch's MKL is expected to use on this processor. Ask torch itself to be certain."""

def supported_isas() -> list[str]:
    """The instruction sets that this processor runs, narrowest first."""

def active_isa() -> str:
    """The instruction set used when none is named. Raises ValueError if RATEL_FORCE_ISA cannot be honoured."""
