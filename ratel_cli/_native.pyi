"""The compiled kernels (kernels/): AdamW in one fused pass, and what measures and tests it.

Training calls `update_*`, imports and exports call `split_bfloat16` and `join_bfloat16`. `adamw_*` and `stream_*` are
what tests and benchmarks compare `update_*` with. Every array is 1-D, contiguous, on the CPU and detached: a torch
tensor (through DLPack) or a numpy array. Arrays are changed in place, may not overlap, and have one length. Wrong types
raise TypeError; wrong devices, shapes, lengths, names and overlaps raise ValueError; nothing has been written then. The
GIL is released.

`isa` names the instruction set ("baseline", "avx2", "avx512"); None takes RATEL_FORCE_ISA if set, else the widest that
the processor runs. All give the same bits. `square_root` says how AdamW's square root is rounded: "correct",
"mkl_avx512" (as torch's MKL on Intel's AVX-512 processors) or "mkl_sse" (as torch's MKL on AMD's; x86 only); None is
native_square_root().

bf16 layout: the fp32 master is hi16 (the bf16 weight, rounded to nearest even) and lo16 (its low half). Where lo16 is
0x8000, a tie, the sign of v32 is set if hi16 was rounded up; v itself is never negative.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, final

_SquareRoot: TypeAlias = Literal["correct", "mkl_avx512", "mkl_sse"]
_Checksums: TypeAlias = list[int | None]

class _Array(Protocol):
    """What torch tensors and numpy arrays have in common."""

    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class AdamWScalars:
    """The numbers of one update, rounded to floats; frozen.

    decay_factor = 1 - lr * weight_decay, step_size = lr / (1 - beta1**t) and bias_correction2_sqrt =
    (1 - beta2**t) ** 0.5. Every gradient is multiplied by gradient_scale first. Raises ValueError for an unknown
    square_root, and for a bias_correction2_sqrt outside 2**-30 to 2**30.
    """

    def __init__(
        self,
        *,
        decay_factor: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        step_size: float,
        bias_correction2_sqrt: float,
        epsilon: float,
        gradient_scale: float,
        square_root: _SquareRoot | None = None,
    ) -> None: ...

class _AdamW(Protocol):
    """One AdamW update of a layout's fields. The gradient, the last array, may be bfloat16, float16 or float32.

    The bits are those of torch.optim.AdamW(foreach=False, fused=False) on fp32 tensors. A NaN becomes 0x7fc00000.
    """

    def __call__(self, *arrays: _Array, scalars: AdamWScalars, isa: str | None = None) -> None: ...

class _Update(Protocol):
    """`adamw_*` on segments of the arrays: (first, last, whether decay_factor applies), in order; and checksums.

    A chunk is `chunk_elements` of the arrays (a multiple of 512); the last one is the rest. `seeds_before` and
    `seeds_after` hold a seed or None for each chunk, and in it for each field in the order of the arrays: a seed asks
    for a checksum before or after the update; an empty list asks for none. Returns the checksums in the same order:
    XXH3-64 of the field's bytes in the chunk, as xxhash.xxh3_64_intdigest computes it. With checksums the arrays must
    have a multiple of 512 elements.
    """

    def __call__(
        self,
        *arrays: _Array,
        scalars: AdamWScalars,
        segments: Sequence[tuple[int, int, bool]],
        chunk_elements: int,
        seeds_before: Sequence[int | None],
        seeds_after: Sequence[int | None],
        isa: str | None = None,
    ) -> tuple[_Checksums, _Checksums]: ...

class _Stream(Protocol):
    """The loads and stores of `adamw_*` with almost no arithmetic: the limit that memory sets.

    Flips bits by the gradient's, so that a second call restores the arrays; only w16 is overwritten.
    """

    def __call__(self, *arrays: _Array, isa: str | None = None) -> None: ...

# Arrays: hi16, lo16, m32, v32, gradient.
adamw_bfloat16: _AdamW
update_bfloat16: _Update
stream_bfloat16: _Stream

# Arrays: w32, m32, v32, gradient.
adamw_float32: _AdamW
update_float32: _Update
stream_float32: _Stream

# Arrays: w16 (the fp16 copy of w32, only written), w32, m32, v32, gradient.
adamw_float16: _AdamW
update_float16: _Update
stream_float16: _Stream

def split_bfloat16(w32: _Array, hi16: _Array, lo16: _Array, v32: _Array, *, isa: str | None = None) -> None:
    """Write the halves of w32 and the sign of v32; v32's other bits stay. Lossless for all 2**32 patterns."""

def join_bfloat16(hi16: _Array, lo16: _Array, v32: _Array, w32: _Array, *, isa: str | None = None) -> None:
    """Write w32, the master that split_bfloat16 was given."""

def square_root(values: _Array, *, square_root: _SquareRoot | None = None, isa: str | None = None) -> None:
    """Replace float32 values by their square roots, as the AdamW kernels compute them."""

def native_square_root() -> _SquareRoot:
    """The rounding that torch's MKL is expected to use on this processor. Only a comparison with torch is certain."""

def supported_isas() -> list[str]:
    """The instruction sets that this processor runs, narrowest first."""

def active_isa() -> str:
    """The instruction set used when none is named. Raises ValueError if RATEL_FORCE_ISA cannot be honoured."""
