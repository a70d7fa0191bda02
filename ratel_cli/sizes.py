"""Sizes, alignments and dtype names that several parts share. Each stands here once, with its reason.

Changing `STRIPE_BYTES`, `CHUNK_ELEMENTS` or an alignment changes where bytes lie in a store. A store's manifest
records the stripes and chunks that it was made with; the alignments are part of the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

DtypeName = Literal["bfloat16", "float32", "float16"]
"""Names of the dtypes that a model computes in, and that its weights have in stores and exports, as torch and the
config spell them. A dtype of products alone would be something else."""
DTYPE_NAMES: Final[dict[str, DtypeName]] = {name: name for name in get_args(DtypeName)}
WeightDtype = Literal["bfloat16", "float32", "float16", "uint8"]
"""Names of the dtypes of weights as they are stored and bound: compute dtypes, and bytes that hold quantised ones."""

QuantisedForm = Literal["nf4", "nf4 double", "int8"]
"""How a matrix is quantised (model/files/quantised.py). `nf4 double`: with double quantisation."""
MergeBase = Literal["dequantised", "original"]
"""What the adapter of a quantised run is added to: what its codes stand for, or the model from before."""
StoredForm = Literal["nf4", "nf4 double", "int8", "mxfp4", "int4"]
"""How the bytes of a quantised matrix stand for it: the above, or what only files have."""

ValueType = Literal["bfloat16", "float16", "float32", "int16", "uint8"]
"""Types of the values that a store holds."""
VALUE_TYPES: Final[dict[str, ValueType]] = {name: name for name in get_args(ValueType)}
VALUE_BYTES: Final[dict[ValueType, int]] = {"bfloat16": 2, "float16": 2, "float32": 4, "int16": 2, "uint8": 1}

Task = Literal["causal_lm", "masked_lm", "classification", "seq2seq", "denoising"]
"""What a model learns to predict: for each token the next one, the tokens that are masked, the class of a row, the next
token of a second text, which a decoder writes to that of an encoder, or the noise in a latent."""

NewTokensInit = Literal["mean", "random", "noisy_mean"]
"""How the rows of new tokens are drawn."""
PreferenceMethod = Literal["dpo", "ipo", "orpo", "simpo", "kto"]
"""How a model learns from answers that are compared."""
FIGURES: Final = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
    "nll_loss", "log_odds_ratio", "log_odds_chosen", "kl",
)  # fmt: skip
"""What is known of micro-batches whose answers are compared, besides their loss, by TRL's names."""

TASKS: Final[dict[str, Task]] = {
    "mlm": "masked_lm",
    "classification": "classification",
    "seq2seq": "seq2seq",
    "latents": "denoising",
}
"""By the type of a dataset; other types are for causal language models."""

PAGE_BYTES: Final = 4096
"""The unit of direct I/O: offsets, lengths and addresses are multiples of it."""
HUGE_PAGE_BYTES: Final = 2 << 20
"""Host buffers lie on huge pages: direct reads were 1.65 times as fast on them, at a seventh of the CPU time."""
STRIPE_BYTES: Final = 4 << 20
"""Consecutive bytes of a store on one drive before the next drive follows."""

PARAMETER_ALIGNMENT: Final = 128
"""Elements. A parameter starts on 256 bytes in 16 bit: the most that kernels look at when they choose a path."""
BLOCK_ALIGNMENT: Final = 2048
"""Elements. A block's length is a multiple of it, so that every field of a record starts on a page in 16 bit. In 8 bit
this and the one before are twice that."""
PACKED_ALIGNMENT: Final = 256
"""Bytes. Where each tensor of an offloaded unit starts: what torch's allocators align to."""

CHUNK_ELEMENTS: Final = 1 << 18
"""Elements of a field that share one checksum: 1 MiB in fp32, 512 KiB in 16 bit."""
CHECKSUM_BYTES: Final = 8
GROUP_ELEMENTS: Final = 1 << 21
"""Elements that the optimizer reads, updates and writes as one group."""

EXPANDED_ELEMENTS: Final = 1 << 22
"""Elements of a quantised matrix that are expanded at once."""
EXPANDING_BYTES: Final = 8 * EXPANDED_ELEMENTS
"""What they take on the way, at most."""
LOGITS_CHUNK_BYTES: Final = 64 << 20
"""Logits of a chunk of tokens in fp32, at most, unless a GPU has memory for more (planning/search/head_chunk.py)."""
IGNORED_TARGET: Final = -100
"""The target of a position without loss, as in torch's cross-entropy."""
SPLIT_KEYS: Final = ("micro_batch_size", "gradient_accumulation_steps")
"""The keys of the config that split a step into micro-batches."""
STEP_KEYS: Final = ("tokens_per_step", *SPLIT_KEYS)
"""The keys of the config that say how many tokens a step has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """How much of a full step the steps of some data have on average, where each row has one sample: shares."""

    micro_batches: float
    """Micro-batches, as a share of those of a full step: the last step of an epoch may have fewer."""
    computed: float
    """Tokens that are computed, padding included, as a share of a full step's: rows are as wide as the longest of their
    micro-batch."""
    tokens: float
    """Tokens of samples, as a share of a full step's tokens."""
