"""Which steps of a run are saved, and which of them is the best.

Invariant: saving writes nothing. A step is pinned in its slot, and the number of slots is fixed, so others must go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.store.store import Store
from ratel_cli.training.best import BestSoFar
from ratel_cli.training.loop_settings import LoopCallbacks, LoopSettings
from ratel_cli.training.metrics import StepMetrics


class SavedSteps:
    """The saved steps of a store."""

    def __init__(
        self,
        store: Store,
        settings: LoopSettings,
        callbacks: LoopCallbacks,
        ranks: Ranks,
        earlier: Sequence[StepMetrics],
    ) -> None:
        """`earlier`: the steps that are done."""
        self._store = store
        self._settings = settings
        self._callbacks = callbacks
        self._ranks = ranks
        self._earlier = earlier
        self.best = BestSoFar() if settings.best is None else settings.best.best_so_far(earlier)
        """The best step so far."""
        self.best_saved = BestSoFar()
        """The best step that is saved. It is not the best one if that was lost."""
        self._saved_for_best = set[int]()
        """Steps that this loop has saved for being the best alone."""

    @property
    def ends_run(self) -> bool:
        """Whether the evaluations end the run."""
        return self._settings.best is not None and self.best.ends(self._settings.best)

    def is_due(self, step: int) -> bool:
        """Whether a step is to be saved for its number, and is not yet."""
        return step > 0 and self._is_time_to_save(step) and step not in self._store.pinned_steps

    def _is_time_to_save(self, step: int) -> bool:
        every = self._settings.save_steps
        return every is not None and step % every == 0

    def save_if_due(self, step: int) -> None:
        """Save the current step, which has this number, if that is due."""
        if self.is_due(step):
            self._save(step)

    def _save(self, step: int, *, instead_of: int | None = None) -> None:
        """Pin the current step. The number of slots of the store is fixed, so others must go first; first of all
        the step `instead_of`."""
        dropped = self._drop_old(step, instead_of)
        self._store.pin()
        self._callbacks.after_save(step, dropped)

    def _drop_old(self, step: int, first: int | None) -> list[int]:
        """Unpin the oldest steps beyond the limit, as Trainer removes checkpoints: neither the best step nor the one
        that is saved now. Without `save_steps` there is no limit but the store's slots: steps that the user had saved
        before stay while they can. Returns them."""
        settings = self._settings
        needed = {step, self.best_saved.step} if self.saves_best else {step}
        others = [each for each in self._store.pinned_steps if each not in needed]
        others.sort(key=lambda each: each != first)
        num_slots = self._store.num_slots - 2 - settings.num_copied
        limit = num_slots if settings.save_steps is None else settings.save_total_limit
        kept = {*self._store.pinned_steps, step} & needed
        dropped = others[: max(0, len(others) + len(kept) - max(limit, len(kept)))]
        for each in dropped:
            self._store.unpin(each)
        return dropped

    def take_as_evaluated(self, metrics: StepMetrics) -> None:
        """Compare an evaluation with those before. A step that is the best is saved."""
        rule = self._settings.best
        value = None if rule is None else rule.value_of(metrics)
        if rule is None or value is None:
            return
        self.best = self.best.after(rule, metrics.step, value)
        if not rule.saves_best:
            return
        before, self.best_saved = self.best_saved.step, self.best_saved.after(rule, metrics.step, value)
        if self.best_saved.step != metrics.step:
            return
        pinned = self._store.pinned_steps
        if before is not None and before in pinned and self._is_for_best_alone(before):
            self._store.unpin(before)
        if metrics.step not in pinned and not self._is_time_to_save(metrics.step):
            self._saved_for_best.add(metrics.step)
            self._save(metrics.step, instead_of=before)

    def _is_for_best_alone(self, step: int) -> bool:
        """Whether a step was saved for being the best alone. Of a step of an earlier process, only `save_steps` tells;
        without it, the user may have saved it."""
        if self._settings.save_steps is None:
            return step in self._saved_for_best
        return not self._is_time_to_save(step)

    @property
    def saves_best(self) -> bool:
        """Whether the best step is saved until a better one is."""
        return self._settings.best is not None and self._settings.best.saves_best

    def _of_first(self, best: BestSoFar) -> BestSoFar:
        """What the first rank has found."""
        if self._ranks.size == 1:
            return best
        known = [math.nan if best.step is None else best.step, math.nan if best.value is None else best.value]
        step, value, number = self._ranks.gathered([*known, best.num_without_gain])[0]
        return BestSoFar(
            step=None if math.isnan(step) else int(step),
            value=None if math.isnan(value) else value,
            num_without_gain=int(number),
        )

    def find_best(self, current: int) -> None:
        """Find the best of the steps that all ranks have, and save it if it is the `current` one. The best step of all
        may be lost: a snapshot has no saved steps, and the rule may be another one than before."""
        rule = self._settings.best
        if rule is None:
            return
        # All ranks know what the first one knows: each has read its own records.
        self.best = self._of_first(self.best)
        if not rule.saves_best:
            return
        saved = {current, *saved_by_all(self._ranks, self._store.pinned_steps)}
        self.best_saved = self._of_first(rule.best_among(self._earlier, saved))
        if self.best_saved.step == current and current not in self._store.pinned_steps:
            if not self._is_time_to_save(current):
                self._saved_for_best.add(current)
            self._save(current)
        if self.best.step is not None and self.best.step != self.best_saved.step:
            self._callbacks.best_is_lost(self.best.step, self.best_saved.step)


def saved_by_all(ranks: Ranks, steps: Sequence[int]) -> set[int]:
    """The steps that all ranks have saved; this one has `steps`. A rank that ended between two saves has others. Raises
    as `Channel.swap`."""
    lengths = [int(number) for (number,) in ranks.gathered([len(steps)])]
    return set.intersection(*({int(step) for step in found} for found in ranks.gathered(steps, lengths=lengths)))
