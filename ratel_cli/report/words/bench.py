"""The result of `ratel bench`, as a Markdown table and as JSON.

Invariant: nothing heavy is imported, and nothing names a person or a place, so that the JSON can be posted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from statistics import median

from ratel_cli.hardware.environment import Environment
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.profile.model_profile import LayerProfile
from ratel_cli.report.words.profile import hardware_rows
from ratel_cli.units import counted, format_bytes, format_count, format_seconds, format_traffic

FORMAT_VERSION = 1
PLAIN, CHECKPOINTING, RATEL = "plain PyTorch", "with checkpointing", "Ratel"
"""Who trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTraining:
    """What one process has measured that trained the model."""

    step_seconds: list[float]
    losses: list[float]
    """The mean loss of each step."""
    peak_bytes: int
    gpu_peak_bytes: int
    predicted_seconds: float = 0.0
    """The time of a step, as Ratel predicted it before the first one; 0 for plain PyTorch, as what follows."""
    planned_bytes: int = 0
    """What the steps were to read and write, each by the plan that it was under."""
    moved_bytes: int = 0
    """Bytes that these steps have read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What `ratel bench` has found."""

    environment: Environment
    hardware: HardwareProfile
    size: str
    num_parameters: int
    dtype: str
    tokens_per_step: int
    micro_batches: int
    layers: dict[str, LayerProfile]
    """A layer on a micro-batch whose rows have one sample, `layer`, or several, `packed`."""
    update_seconds: float
    """The update of a layer's parameters, on one thread."""
    exact_losses: list[float]
    """Losses of plain PyTorch with gradients summed in fp32 and AdamW on the CPU, which Ratel's must be."""
    rounds: list[dict[str, BenchTraining | None]]
    """By who trained, in turns; None: the model does not fit into memory that way."""

    def to_json(self) -> dict[str, object]:
        """The content that `ratel bench --json` prints, without the names of directories."""
        return {"format_version": FORMAT_VERSION, **asdict(self), "hardware": _nameless(self.hardware).to_json()}

    def trainings(self, name: str) -> list[BenchTraining]:
        """The trainings of one name, of all rounds."""
        return [each for trained in self.rounds if (each := trained[name]) is not None]

    def seconds(self, name: str) -> float:
        """The median of the steps of all rounds, without the first and the last step of each."""
        return median(second for each in self.trainings(name) for second in each.step_seconds[1:-1])


def bench_lines(found: BenchReport) -> list[str]:
    """A Markdown table of names and facts, for whoever posts it."""
    counts = counted(found.micro_batches, "micro-batch", "micro-batches"), counted(len(found.rounds), "round")
    size = f"{found.size}: {format_count(found.num_parameters)} parameters in {found.dtype}"
    rows = [
        *hardware_rows(_nameless(found.hardware), dtype=found.dtype),
        ("model", f"{size}; steps of {found.tokens_per_step} tokens in {counts[0]}; {counts[1]}"),
    ]
    for name, layer in found.layers.items():
        forward, backward = layer.forward_seconds or 0.0, layer.backward_seconds or 0.0
        rows.append((name, f"forward {format_seconds(forward)}, backward {format_seconds(backward)}"))
    rows.append(("update", f"{format_seconds(found.update_seconds)} for a layer, on one thread"))
    for name in found.rounds[0]:
        ran = found.trainings(name)
        memory = [
            f"{format_bytes(each.peak_bytes)} of RAM, {format_bytes(each.gpu_peak_bytes)} on a GPU" for each in ran
        ]
        rows.append((name, f"{format_seconds(found.seconds(name))} per step, {memory[0]}" if ran else "does not fit"))
    ours, measured = found.trainings(RATEL), found.seconds(RATEL)
    predicted = median(each.predicted_seconds for each in ours)
    moved, planned = sum(each.moved_bytes for each in ours), sum(each.planned_bytes for each in ours)
    pairs = [pair for each in ours for pair in zip(each.losses, found.exact_losses, strict=True)]
    equal = sum(own == exact for own, exact in pairs)
    rows += [
        ("predicted", f"{format_seconds(predicted)} per step, {predicted / measured - 1:+.0%}"),
        ("moved", f"{format_traffic(moved)} of {format_traffic(planned)} planned"),
        ("losses", f"{equal} of {len(pairs)} equal those of plain PyTorch, to the bit"),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.environment.packages.items())),
    ]
    return [f"| {name} | {fact} |" for name, fact in (("what", "measured"), ("---", "---"), *rows)]


def _nameless(hardware: HardwareProfile) -> HardwareProfile:
    """The machine without the names of its directories."""
    return replace(hardware, nvme=replace(hardware.nvme, paths=()))
