"""The result of `ratel eval`, as rows that a person reads and as JSON.

Invariant: nothing heavy is imported.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ratel_cli.units import counted, format_seconds, format_token_rate, format_traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What a model makes of some rows."""

    model: str
    """Whose weights they are, such as `outputs/my-run, step 40`."""
    data: str
    loss: float
    """Mean cross-entropy over the tokens with loss; of a classifier over the rows."""
    accuracy: float | None
    """The share of the rows that a classifier gives their class; None for other models."""
    perplexity: float
    """e to the power of the loss."""
    num_samples: int
    num_rejected: int
    """Rows that cannot be used."""
    num_tokens: int
    num_loss_tokens: int
    num_sequences: int
    sequence_len: int
    """The most tokens of a sample."""
    is_packed: bool
    """Whether samples share sequences of `sequence_len` tokens; otherwise each has a sequence of its own."""
    dtype: str
    seconds: float
    bytes_read: int
    """Bytes of weights that were read."""


def evaluation_rows(found: EvaluationReport) -> list[tuple[str, str]]:
    """Rows of a name and a fact."""
    sequences = counted(found.num_sequences, "sequence")
    packing = f"packed into {sequences} of {found.sequence_len}" if found.is_packed else f"in {sequences}, not packed"
    rejected = f", {counted(found.num_rejected, 'row')} rejected" if found.num_rejected else ""
    speed = f"{format_token_rate(found.num_tokens / found.seconds)}, {format_traffic(found.bytes_read)} of weights read"
    of_task = (
        ("perplexity", _perplexity(found.perplexity))
        if found.accuracy is None
        else ("accuracy", f"{100 * found.accuracy:.2f} % of the rows")
    )
    return [
        ("model", found.model),
        ("data", f"{found.data}: {counted(found.num_samples, 'sample')}{rejected}"),
        ("tokens", f"{found.num_tokens}, {found.num_loss_tokens} with loss, {packing}"),
        ("loss", f"{found.loss:.4f}"),
        of_task,
        ("time", f"{format_seconds(found.seconds)}, {speed}"),
    ]


def evaluation_to_json(found: EvaluationReport) -> dict[str, object]:
    """The content that `ratel eval --json` prints."""
    return asdict(found)


def _perplexity(value: float) -> str:
    """Four digits, and thousands written out; powers of ten only where that would be a row of zeros."""
    if value < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if value < 1e9 else f"{value:.3e}"
