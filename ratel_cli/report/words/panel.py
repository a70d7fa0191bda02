"""The panel of a run that trains on a terminal: how far it is, the loss, what is busy, what stalls, what it takes.

The loop's thread hands over rows and does nothing else; all words and sums are made by the thread that draws.

Invariant: no line is wider than the terminal, and parts that do not fit are left out whole, the least important first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import perf_counter

from rich.text import Text

from ratel_cli.planning.time.step_time import RESOURCES
from ratel_cli.report.words.plan import RESOURCE_NAMES
from ratel_cli.report.words.run import LEAST_SHARE, figure_words, fitted
from ratel_cli.report.words.status import epoch_words
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.training.recent import RecentSteps
from ratel_cli.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_token_rate,
    format_traffic,
    format_wait,
    meter,
    sparkline,
)

_MOST_COLUMNS = 80
_MOST_CELLS = 60
_RATE_COLUMNS = len("9.99 MB/s")
_MUCH_STALLED = 0.1
_DAY_SECONDS = 86400.0
_MOST_SECONDS = 300 * _DAY_SECONDS
"""The end of a longer run is not given, as a day without its year would mislead."""
_SHOWN_APART = ("loss", "step_seconds", "tokens_per_second")
"""Figures of a step that have a place of their own: above the others, or as those of the last steps."""
_EVALUATION_RANK = 4
"""As `Figure.rank`."""
_LEAST_SECONDS = 2.0
"""A step that takes less is not followed while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelFacts:
    """What stays the same while a run trains."""

    num_steps: int
    """Steps in the whole run."""
    steps_per_epoch: int | None = None
    """None if that is not known."""
    first_step: int
    """The last step that was done before."""
    has_gpu: bool
    host_limit_bytes: int
    gpu_limit_bytes: int | None
    store_bytes: int
    """What the run takes on the drives."""
    free_bytes: Callable[[], int]
    """What is free there now."""
    written_bytes: int
    """What the run has written there before."""
    state_bytes: int
    """What a step writes to the store."""
    max_bytes_written: int | None
    """The limit of what the run writes to the store; None if there is none."""
    num_ranks: int = 1


Row = tuple[float, StepMetrics]
"""The time at which a step was done, and its metrics."""


class Panel:
    """Takes rows from the loop's thread and shows them in another one. It never waits and never draws by itself."""

    def __init__(
        self,
        facts: PanelFacts,
        *,
        predicted_seconds: float,
        earlier_losses: Sequence[float] = (),
        earlier_steps: Sequence[StepMetrics] = (),
        is_stopping: Callable[[], bool] = lambda: False,
        ascii_only: bool = False,
        clock: Callable[[], float] = perf_counter,
        local_time: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        """`predicted_seconds`: of a step. `earlier_losses`: of the steps before, in order. `earlier_steps`: the last
        of these. `is_stopping`: whether the user asked the run to stop.
        """
        self._facts = facts
        self._is_stopping = is_stopping
        self._ascii_only = ascii_only
        self._clock = clock
        self._local_time = local_time
        self._rows: deque[Row] = deque()
        """Rows that were handed over and not shown yet."""
        self._steps = RecentSteps(
            num_steps=facts.num_steps,
            step=facts.first_step,
            predicted_seconds=predicted_seconds,
            now=clock(),
            earlier=earlier_steps,
        )
        for loss in earlier_losses:
            self._steps.losses.add(loss)
        self._written_bytes = facts.written_bytes
        self._evaluated: tuple[int, float, int | None] | None = None
        self._doing: str | None = None

    def show(self, metrics: StepMetrics) -> None:
        """Hand over a step that was done now."""
        self._rows.append((self._clock(), metrics))

    def show_evaluation(self, step: int, loss: float, *, best_step: int | None = None) -> None:
        """Hand over the loss on the held-out samples after a step. `best_step`: of all so far; None if none is."""
        self._evaluated = (step, loss, best_step)

    def show_work(self, what: str | None) -> None:
        """Hand over what the run does instead of a step; None: it is at the next step."""
        self._doing = what

    def lines(self, width: int) -> list[Text]:
        """The panel for a terminal with this many columns."""
        while self._rows:
            now, metrics = self._rows.popleft()
            self._steps.add(metrics, now)
            self._written_bytes += metrics.moved_bytes["nvme write"]
        width = max(1, min(width, _MOST_COLUMNS))
        lines = [
            Text(),
            self._progress(width),
            *self._pace(width),
            *self._losses(width),
            *self._resources(width),
            self._stalls(width),
            *self._memory(width),
            self._drives(width),
        ]
        for line in lines:
            line.truncate(width)
        return lines

    def _progress(self, width: int) -> Text:
        step, num_steps = self._steps.step, self._facts.num_steps
        share = step / num_steps if num_steps else 1.0
        title, percent = f"step {step}/{num_steps} ", f" {share * 100:3.0f} %"
        return Text.assemble((title, "bold"), *self._meter(share, width - len(title) - len(percent), "cyan"), percent)

    def _pace(self, width: int) -> list[Text]:
        """When the run ends, and how far the step is that runs; or what happens instead."""
        now = self._clock()
        steps = self._steps
        expected, elapsed = steps.step_seconds, now - steps.since
        step = ""
        if self._doing is None and expected >= _LEAST_SECONDS and steps.step < steps.num_steps:
            words = " of about" if elapsed <= expected else ", expected"
            step = f"step {steps.step + 1}: {format_wait(elapsed)}{words} {format_seconds(expected)}"
        if self._is_stopping():
            return self._stopping(width)
        left = steps.seconds_left(now)
        ends = self._local_time() + timedelta(seconds=min(left, _MOST_SECONDS))
        when = f"{ends:%H:%M}" if left < _DAY_SECONDS else f"{ends:%a %d %b %H:%M}"
        parts = [
            self._doing or "",
            f"{format_wait(left)} left",
            step,
            f"ends {when}" if left < _MOST_SECONDS else "",
            "" if step or self._doing else f"{format_seconds(expected)} per step",
            epoch_words(steps.step + 1, steps.num_steps, self._facts.steps_per_epoch),
        ]
        return [Text(fitted([part for part in parts if part], width))]

    def _stopping(self, width: int) -> list[Text]:
        """Confirms a request to stop, in one line or in two."""
        steps, how = self._steps, "Ctrl-C again ends at once"
        what = "stopping soon"
        if self._doing is None and steps.step < steps.num_steps:
            what = f"stopping at the next block; resume repeats step {steps.step + 1}"
        both = f"{what}; {how}"
        return [Text(words, "yellow") for words in ([both] if len(both) <= width else [what, how])]

    def _losses(self, width: int) -> list[Text]:
        """The curve of the loss, and the numbers of the last step."""
        last = self._steps.last
        title = f"loss {last.loss:.4f}  " if last else "loss  "
        curve = sparkline(self._steps.losses.points(max(1, width - len(title))), ascii_only=self._ascii_only)
        if last is None:
            return [Text.assemble(title, (curve, "green")), Text("tokens/s after the first step", "dim")]
        parts = [(figure.rank, words) for figure, words in figure_words(last) if figure.key not in _SHOWN_APART]
        parts.append((0, format_token_rate(self._steps.tokens_per_second)))
        if self._evaluated is not None:
            step, loss, best_step = self._evaluated
            best = "" if best_step is None else " (the best)" if best_step == step else f" (best: step {best_step})"
            parts.append((_EVALUATION_RANK, f"eval loss {loss:.4f} after step {step}{best}"))
        by_rank = [words for _, words in sorted(parts, key=lambda part: part[0])]
        return [Text.assemble(title, (curve, "green")), Text(fitted(by_rank, width))]

    def _resources(self, width: int) -> list[Text]:
        """A bar for each resource that this machine has."""
        names = {resource: RESOURCE_NAMES[resource] for resource in RESOURCES}
        names["compute"] = "GPU compute" if self._facts.has_gpu else "CPU compute"
        if not self._facts.has_gpu:
            del names["up"], names["down"]
        if self._facts.num_ranks == 1:
            del names["network"]
        title_width = max(map(len, names.values()))
        lines, sums = [], self._steps.sums
        for resource, name in names.items():
            share, rate = sums.busy(resource), sums.moved_per_second(resource)
            facts = f" {share * 100:3.0f} %  {format_rate(rate) if rate else '':<{_RATE_COLUMNS}}"
            cells = min(_MOST_CELLS, width - title_width - 2 - len(facts))
            lines.append(Text.assemble(f"{name:<{title_width}}  ", *self._meter(share, cells, "cyan"), facts.rstrip()))
        return lines

    def _stalls(self, width: int) -> Text:
        shown = [(resource, share) for resource, share in self._steps.sums.stalls().items() if share >= LEAST_SHARE]
        if not shown:
            return Text("no stall")
        total = sum(share for _, share in shown)
        causes = [f"{RESOURCE_NAMES[resource]} {share * 100:.0f} %" for resource, share in shown]
        last = self._steps.last
        if last is not None and last.slowest_rank is not None:
            causes.append(f"rank {last.slowest_rank} is the slowest")
        return Text(
            fitted([f"stalled {total * 100:.0f} %", *causes], width), "yellow" if total >= _MUCH_STALLED else ""
        )

    def _memory(self, width: int) -> list[Text]:
        """Memory at the peak and its limit; no line before the first step, as the peak is not known."""
        facts, last = self._facts, self._steps.last
        if last is None:
            return []
        parts = [f"RAM {format_bytes(last.host_peak_bytes)} of {format_bytes(facts.host_limit_bytes)}"]
        if facts.gpu_limit_bytes is not None:
            parts.append(f"GPU {format_bytes(last.gpu_peak_bytes)} of {format_bytes(facts.gpu_limit_bytes)}")
        return [Text(fitted(parts, width))]

    def _drives(self, width: int) -> Text:
        facts = self._facts
        taken = f"NVMe {format_bytes(facts.store_bytes)} taken, {format_bytes(facts.free_bytes())} free"
        written = format_traffic(self._written_bytes)
        if facts.max_bytes_written is not None:  # the limit is on what goes to the store
            state_bytes = facts.written_bytes + facts.state_bytes * (self._steps.step - facts.first_step)
            written = f"{format_traffic(state_bytes)} of {format_traffic(facts.max_bytes_written)}"
        return Text(fitted([taken, f"written {written}"], width))

    def _meter(self, share: float, cells: int, style: str) -> tuple[tuple[str, str], tuple[str, str]]:
        done, rest = meter(share, max(0, cells), ascii_only=self._ascii_only)
        return (done, style), (rest, "dim")
