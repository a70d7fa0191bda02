"""The compiled kernels (kernels/): update rules in one fused pass, what measures and tests them, what cuts transfers.

Training calls `update_*`, imports and exports call `split_*` and `join_*`. `adamw_*`, `lion_*` and so on, and
`stream_*`, are what tests and benchmarks compare `update_*` with. Every array is 1-D, contiguous, on the CPU and
detached: a torch tensor (through DLPack) or a numpy array. Arrays are changed in place, may not overlap, and have one
length; those with one value for several elements, or with bytes, have at least as many as the elements need. Wrong
types raise TypeError; wrong devices, shapes, lengths, names and overlaps raise ValueError; nothing has been written
then. The GIL is released. An array that a kernel writes may also come as its bytes, a memoryview of format "B", which
takes less time than a view of torch.

`isa` names the instruction set ("baseline", "avx2", "avx512"); None takes RATEL_FORCE_ISA if set, else the widest that
the processor runs. All give the same bits. `square_root` says how AdamW's square root is rounded: "correct",
"mkl_avx512" (as torch's MKL on Intel's AVX-512 processors) or "mkl_sse" (as torch's MKL on AMD's; x86 only); None is
native_square_root().

bf16 layout: the fp32 master is hi16 (the bf16 weight, rounded to nearest even) and lo16 (its low half). Where lo16 is
0x8000, a tie, one more bit is set if hi16 was rounded up: the sign of v32, which is never negative itself; or without a
v32 the element's bit in tie8, the lowest bit of a byte first. Stochastic layout: p16, the bf16 weight, is all; an
update rounds it stochastically, by the random bits that docs/store-format.md defines.
"""

from array import array
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias, TypeVar, final

from ratel_cli.sizes import DtypeName

_Extent = TypeVar("_Extent", bound=tuple[int, int, memoryview])
_SquareRoot: TypeAlias = Literal["correct", "mkl_avx512", "mkl_sse"]

class _Array(Protocol):
    """What torch tensors and numpy arrays have in common."""

    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class AdamWScalars:
    """The numbers of one update by AdamW, rounded to floats; frozen.

    decay_factor = 1 - lr * weight_decay, step_size = lr / (1 - beta1**t) and bias_correction2_sqrt =
    (1 - beta2**t) ** 0.5. Every gradient is multiplied by gradient_scale first. Raises ValueError for an unknown
    square_root, and for a bias_correction2_sqrt outside 2**-30 to 2**30.
    """

    def __init__(
        self,
        *,
        decay_factor: float,
        beta1: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        step_size: float,
        bias_correction2_sqrt: float,
        epsilon: float,
        gradient_scale: float,
        square_root: _SquareRoot | None = None,
    ) -> None: ...

@final
class LionScalars:
    """The numbers of one update by Lion, rounded to floats; frozen. decay_factor = 1 - lr * weight_decay."""

    def __init__(
        self,
        *,
        decay_factor: float,
        beta1: float,
        one_minus_beta1: float,
        beta2: float,
        one_minus_beta2: float,
        learning_rate: float,
        gradient_scale: float,
    ) -> None: ...

@final
class SgdScalars:
    """The numbers of one update by gradient descent, rounded to floats; frozen.

    `is_first`: the momentum is not there yet, and becomes the gradient.
    """

    def __init__(
        self,
        *,
        weight_decay: float,
        momentum: float,
        learning_rate: float,
        gradient_scale: float,
        is_first: bool,
        is_nesterov: bool,
    ) -> None: ...

@final
class MuonScalars:
    """The numbers of one update by Muon, rounded to floats; frozen. decay_factor = 1 - lr * weight_decay, step_size =
    lr adjusted to the matrix's shape."""

    def __init__(
        self, *, decay_factor: float, one_minus_momentum: float, step_size: float, gradient_scale: float
    ) -> None: ...

_Scalars_contra = TypeVar(
    "_Scalars_contra", bound=AdamWScalars | LionScalars | SgdScalars | MuonScalars, contravariant=True
)

@final
class ChunkChecksums:
    """Where the checksums of one block's chunks stand in a table, and what their seeds are made of.

    `table`: an array of 64-bit numbers. `is_set`: as long, 1 for each entry that has a checksum. `entries`: for each
    field of the record, in its order, the table's entry for the block's first chunk, those of the next chunks follow;
    None: no checksum of this field is wanted. The seed is the XXH3-64 of store id (16 bytes), step (8 bytes), block,
    number of the field and number of the chunk in the block (4 bytes each). Raises ValueError for another length of
    `store_id` or `is_set`.
    """

    def __init__(
        self,
        *,
        table: array[int],
        is_set: bytearray,
        store_id: bytes,
        step: int,
        block: int,
        entries: Sequence[int | None],
    ) -> None: ...

class _Plain(Protocol[_Scalars_contra]):
    """One update of a layout's fields. The gradient, the last array, may be bfloat16, float16 or float32.

    The bits are those of the rule's reference on fp32 tensors (kernels/README.md). A NaN becomes 0x7fc00000.
    `roundings`: a stochastic layout needs one pair, and any other none: the parameter's key in this update, and the
    number of the first element. Raises ValueError for another number of pairs.
    """

    def __call__(
        self,
        *arrays: _Array,
        scalars: _Scalars_contra,
        roundings: Sequence[tuple[int, int]] = (),
        isa: str | None = None,
    ) -> None: ...

class _Update(Protocol[_Scalars_contra]):
    """The plain update on segments of the arrays: (first, last, whether weight decay applies), in order; and checksums.

    A segment begins where a unit of the rule does, and where a byte of tie8 does. A chunk is `chunk_elements` of the
    arrays (a multiple of 512); the last one is the rest. The arrays begin with chunk number `first_chunk` of their
    block. A checksum is the XXH3-64 of the field's bytes in the chunk, as xxhash.xxh3_64_intdigest computes it with the
    chunk's seed; of a field with less than two bytes an element, the last one is that of all bytes up to the end of a
    page of 4096, which the array must have. Those of the bytes before the update are compared with the table of
    `before`, all of which must be set; those after it are entered into the table of `after`, and set there. None:
    neither is wanted. Returns which of the former differ: (number of the field, number of the chunk in the arrays),
    both from 0. With checksums the arrays must have a multiple of 512 elements. `roundings`: as in the plain update, a
    pair for each segment. `gradient_dtype`: the gradient comes as
    its bytes, too, and this is the type of its elements.
    """

    def __call__(
        self,
        *arrays: _Array | memoryview,
        scalars: _Scalars_contra,
        segments: Sequence[tuple[int, int, bool]],
        chunk_elements: int,
        first_chunk: int = 0,
        before: ChunkChecksums | None = None,
        after: ChunkChecksums | None = None,
        roundings: Sequence[tuple[int, int]] = (),
        gradient_dtype: DtypeName | None = None,
        isa: str | None = None,
    ) -> list[tuple[int, int]]: ...

class _Stream(Protocol):
    """The loads and stores of an update with almost no arithmetic: the limit that memory sets.

    Flips bits by the gradient's, so that a second call restores the arrays; only w16 is overwritten.
    """

    def __call__(self, *arrays: _Array, isa: str | None = None) -> None: ...

# Arrays: the fields of the rule's record (ratel_cli/schedule/rules.py) in their order, and the gradient.

adamw_bfloat16: _Plain[AdamWScalars]
adamw_stochastic: _Plain[AdamWScalars]
adamw_float32: _Plain[AdamWScalars]
adamw_float16: _Plain[AdamWScalars]
update_adamw_bfloat16: _Update[AdamWScalars]
update_adamw_stochastic: _Update[AdamWScalars]
update_adamw_float32: _Update[AdamWScalars]
update_adamw_float16: _Update[AdamWScalars]
stream_adamw_bfloat16: _Stream
stream_adamw_stochastic: _Stream
stream_adamw_float32: _Stream
stream_adamw_float16: _Stream

adamw_8bit_bfloat16: _Plain[AdamWScalars]
adamw_8bit_stochastic: _Plain[AdamWScalars]
adamw_8bit_float32: _Plain[AdamWScalars]
adamw_8bit_float16: _Plain[AdamWScalars]
update_adamw_8bit_bfloat16: _Update[AdamWScalars]
update_adamw_8bit_stochastic: _Update[AdamWScalars]
update_adamw_8bit_float32: _Update[AdamWScalars]
update_adamw_8bit_float16: _Update[AdamWScalars]
stream_adamw_8bit_bfloat16: _Stream
stream_adamw_8bit_stochastic: _Stream
stream_adamw_8bit_float32: _Stream
stream_adamw_8bit_float16: _Stream

lion_bfloat16: _Plain[LionScalars]
lion_stochastic: _Plain[LionScalars]
lion_float32: _Plain[LionScalars]
lion_float16: _Plain[LionScalars]
update_lion_bfloat16: _Update[LionScalars]
update_lion_stochastic: _Update[LionScalars]
update_lion_float32: _Update[LionScalars]
update_lion_float16: _Update[LionScalars]
stream_lion_bfloat16: _Stream
stream_lion_stochastic: _Stream
stream_lion_float32: _Stream
stream_lion_float16: _Stream

sgd_bfloat16: _Plain[SgdScalars]
sgd_stochastic: _Plain[SgdScalars]
sgd_float32: _Plain[SgdScalars]
sgd_float16: _Plain[SgdScalars]
update_sgd_bfloat16: _Update[SgdScalars]
update_sgd_stochastic: _Update[SgdScalars]
update_sgd_float32: _Update[SgdScalars]
update_sgd_float16: _Update[SgdScalars]
stream_sgd_bfloat16: _Stream
stream_sgd_stochastic: _Stream
stream_sgd_float32: _Stream
stream_sgd_float16: _Stream

sgd_momentum_bfloat16: _Plain[SgdScalars]
sgd_momentum_stochastic: _Plain[SgdScalars]
sgd_momentum_float32: _Plain[SgdScalars]
sgd_momentum_float16: _Plain[SgdScalars]
update_sgd_momentum_bfloat16: _Update[SgdScalars]
update_sgd_momentum_stochastic: _Update[SgdScalars]
update_sgd_momentum_float32: _Update[SgdScalars]
update_sgd_momentum_float16: _Update[SgdScalars]
stream_sgd_momentum_bfloat16: _Stream
stream_sgd_momentum_stochastic: _Stream
stream_sgd_momentum_float32: _Stream
stream_sgd_momentum_float16: _Stream

# Behind the fields: the direction, bfloat16, which is only read.

muon_bfloat16: _Plain[MuonScalars]
muon_stochastic: _Plain[MuonScalars]
muon_float32: _Plain[MuonScalars]
muon_float16: _Plain[MuonScalars]
update_muon_bfloat16: _Update[MuonScalars]
update_muon_stochastic: _Update[MuonScalars]
update_muon_float32: _Update[MuonScalars]
update_muon_float16: _Update[MuonScalars]
stream_muon_bfloat16: _Stream
stream_muon_stochastic: _Stream
stream_muon_float32: _Stream
stream_muon_float16: _Stream

def split_bfloat16(w32: _Array, hi16: _Array, lo16: _Array, v32: _Array, *, isa: str | None = None) -> None:
    """Write the halves of w32 and the sign of v32; v32's other bits stay. Lossless for all 2**32 patterns."""

def join_bfloat16(hi16: _Array, lo16: _Array, v32: _Array, w32: _Array, *, isa: str | None = None) -> None:
    """Write w32, the master that split_bfloat16 was given."""

def split_tied_bfloat16(w32: _Array, hi16: _Array, lo16: _Array, tie8: _Array, *, isa: str | None = None) -> None:
    """Write the halves of w32 and the elements' bits of tie8. Lossless for all 2**32 patterns."""

def join_tied_bfloat16(hi16: _Array, lo16: _Array, tie8: _Array, w32: _Array, *, isa: str | None = None) -> None:
    """Write w32, the master that split_tied_bfloat16 was given."""

def quantise_nf4(values: _Array, codes: _Array, magnitudes: _Array) -> None:
    """Write the NF4 codes of float32 `values`, two in a byte, and the largest magnitude of each 64.

    `codes`: bytes, one for each two values; `magnitudes`: float32. The last group may be partial, and the upper half of
    a last byte alone in use. Raises ValueError and TypeError for arrays that do not fit.
    """

def dynamic_map(*, signed: bool) -> list[float]:
    """What the 256 codes of m (`signed`) or of v stand for, in fp32, before they are scaled. They rise."""

def square_root(values: _Array, *, square_root: _SquareRoot | None = None, isa: str | None = None) -> None:
    """Replace float32 values by their square roots, as the AdamW kernels compute them."""

class Ring:
    """A ring of io_uring. One thread at a time may prepare, submit and reap. Not final: tests change what it reaps.

    `num_entries`: the most requests that can be prepared between two submits. Raises OSError where the kernel has no
    io_uring, or does not allow it; every method raises ValueError once the ring is closed.
    """

    def __init__(self, num_entries: int) -> None: ...
    def prepare(self, *, writes: bool, fd: int, memory: memoryview, offset: int, key: int) -> None:
        """Put a request on the ring: all of `memory`, less than 2 GiB, to or from `offset` of the file.

        The memory must live until the completion with this `key`. Raises IndexError if no entry is free.
        """

    def prepare_timer(self, seconds: float, key: int) -> None:
        """Put a timer on the ring, which completes after `seconds`. One at a time."""

    def submit(self) -> None:
        """Hand everything prepared to the kernel, without the GIL. Raises OSError if it takes no more."""

    def reap(self) -> list[tuple[int, int]]:
        """The completions that are there now, as (key, bytes moved or the negative number of an error)."""

    def wait(self) -> None:
        """Block, without the GIL, until something has completed or `wake` was called since the last wait."""

    def wake(self) -> None:
        """Let `wait` return. From any thread."""

    def close(self) -> None:
        """Close the ring. The kernel keeps its own hold on the pages of what it has not completed. Idempotent."""

@final
class Stripes:
    """Spreads logical addresses over files (ratel_cli/io/striping.py).

    `turns`: for each stripe of a cycle its file, and how many stripes of that file came before it in the cycle;
    `weights`: how many each file has in a cycle. Raises ValueError if they do not go together.
    """

    def __init__(
        self, *, turns: Sequence[tuple[int, int]], weights: Sequence[int], stripe_bytes: int, header_bytes: int
    ) -> None: ...
    def ranges(self, address: int, num_bytes: int) -> list[tuple[int, int, int]]:
        """(file, offset, bytes) of each range that holds logical bytes [address, address + num_bytes), in order."""

    def extents(
        self, parts: Sequence[tuple[int, memoryview]], fds: Sequence[int], extent: type[_Extent]
    ) -> list[_Extent]:
        """(descriptor, offset, memory) of each range that holds the memories, each from its logical address on.

        `fds`: one descriptor for each file. `extent`: the type of these tuples. Raises TypeError for other types, and
        ValueError for another number of descriptors and for memory that is not contiguous bytes.
        """

def cut_extents(
    extents: Sequence[tuple[int, int, memoryview]], most_bytes: int, page_bytes: int
) -> list[tuple[int, int, memoryview]]:
    """Extents of at most `most_bytes` each, none of them empty.

    Raises ValueError unless offsets, lengths and addresses are multiples of `page_bytes`, and TypeError for anything
    but memoryviews.
    """

def address_of(memory: memoryview) -> int:
    """The address of the first byte of a writable buffer. Raises BufferError for one that is read-only."""

def native_square_root() -> _SquareRoot:
    """The rounding that torch's MKL is expected to use on this processor. Only a comparison with torch is certain."""

def supported_isas() -> list[str]:
    """The instruction sets that this processor runs, narrowest first."""

def active_isa() -> str:
    """The instruction set used when none is named. Raises ValueError if RATEL_FORCE_ISA cannot be honoured."""
