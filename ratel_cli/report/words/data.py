"""What `ratel data` prints: a table of the datasets, rows about an epoch, rejected rows; or all of it as JSON.

Invariant: nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ratel_cli.data.files.lines import Reject
from ratel_cli.data.samples.summary import DataReport, SetStatistics, ShownSample
from ratel_cli.report.words.plan import aligned
from ratel_cli.units import counted

_HEADINGS = (
    "dataset",
    "rows",
    "rejected",
    "truncated",
    "dropped",
    "samples",
    "tokens",
    "with loss",
    "shortest",
    "median",
    "95 %",
    "longest",
)


def set_lines(sets: Sequence[SetStatistics], test_sets: Sequence[SetStatistics]) -> list[str]:
    """The lines of a table with a row for each dataset. Lengths are tokens of a sample."""
    rows = [_row(each, each.name) for each in sets] + [_row(each, f"{each.name} (test)") for each in test_sets]
    return aligned([_HEADINGS, *rows])


def summary_rows(report: DataReport) -> list[tuple[str, str]]:
    """Rows of a name and a fact: what an epoch consists of."""
    steps = counted(report.steps_per_epoch, "step")
    rows = [
        ("epoch", f"{counted(report.num_samples, 'sample')}, {report.num_tokens} tokens, {steps}"),
        _sequences(report),
    ]
    if report.num_held_out:
        rows.append(("held out", f"{report.num_held_out} samples for evaluation"))
    return rows


def _sequences(report: DataReport) -> tuple[str, str]:
    """How full packed sequences are; of others, how much padding is computed."""
    sequences, full = counted(report.num_sequences, "sequence"), 100 * report.packing_efficiency
    if report.is_packed:
        return "packing", f"{sequences}, {full:.1f} % full"
    return "padding", f"{sequences} of one sample; {100 - full:.1f} % of the tokens that are computed is padding"


def sample_title(sample: ShownSample) -> str:
    """The line above a sample."""
    with_loss = sum(sample.has_loss)
    loss = f"{with_loss} {'that may be masked' if sample.may_be_masked else 'with loss'}"
    fact = loss if sample.label is None else f"class {sample.label}"
    which = "" if sample.answer is None else f", the {sample.answer} answer"
    return f"{sample.dataset}, sample {sample.number}{which}: {len(sample.input_ids)} tokens, {fact}"


def reject_lines(rejects: Sequence[Reject]) -> list[str]:
    """A line for each rejected row."""
    return [str(reject) for reject in rejects] or ["no row is rejected"]


def data_to_json(report: DataReport) -> dict[str, object]:
    """The content that `ratel data --json` prints."""
    return {
        "datasets": [asdict(each) for each in report.sets],
        "test_datasets": [asdict(each) for each in report.test_sets],
        "epoch": {
            "num_samples": report.num_samples,
            "num_tokens": report.num_tokens,
            "num_sequences": report.num_sequences,
            "num_steps": report.steps_per_epoch,
            "packing_efficiency": report.packing_efficiency,
        },
        "num_held_out": report.num_held_out,
        "samples": [
            {
                "dataset": each.dataset,
                "number": each.number,
                "parts": [{"text": text, "has_loss": has_loss} for text, has_loss in each.parts],
                "input_ids": each.input_ids,
                "has_loss": each.has_loss,
                **({} if each.answer is None else {"answer": each.answer}),
            }
            for each in report.samples
        ],
        "rejects": [asdict(each) for each in report.rejects],
    }


def _row(each: SetStatistics, name: str) -> tuple[str, ...]:
    counts = (each.num_rows, each.num_rejected, each.num_truncated, each.num_dropped, each.num_samples, each.num_tokens)
    return (name, *map(str, (*counts, each.num_loss_tokens, *each.lengths)))
