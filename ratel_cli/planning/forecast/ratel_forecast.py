"""Forecasts of what Ratel itself does: plans for a machine that need not be this one. Pure.

A plan for twice the micro-batch takes the profile twice: everything in it is taken to be proportional to the rows of a
micro-batch, as if the device were as busy with half of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import margin_bytes, plannable_gpu_bytes
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.forecast.forecast import Forecast, Setting, Tier
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.head_chunk import best_chunk, with_chunk
from ratel_cli.planning.search.plan import Plan, make_plan
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.search.split import SplitRate
from ratel_cli.schedule.slices import fullest_slice
from ratel_cli.store.layout import RankSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class RatelForecaster:
    """One model as a config would train it."""

    spec: ModelSpec
    profile: ModelProfile
    decisions: Decisions
    """Their `host_limit_bytes` and `wear` are not used: they depend on the setting."""
    process_bytes: int
    estimate: ModelProfile | None = None
    """Where `profile` was recorded, the one from shapes alone: a new run chooses the chunks of its head by that."""

    def forecast(self, setting: Setting) -> Forecast:
        """The plan as a forecast; of a run that does not fit, the plan for just as much memory as it takes."""
        return _forecast(self.plan(setting), setting, self.spec, device_limit_bytes=self.device_limit_bytes(setting))

    def rate(self, setting: Setting) -> SplitRate:
        """See `Forecaster`. What other rules for wear would choose is not looked for."""
        plan = self.plan(setting, trades=False)
        limit_bytes = self.device_limit_bytes(setting)
        return _forecast(plan, setting, self.spec, device_limit_bytes=limit_bytes).split_rate

    def plan(self, setting: Setting, *, trades: bool = True) -> Plan:
        """The plan for this setting. Where the run does not fit, limits are raised until it does. `trades` as of
        `make_plan`."""
        setting = self.chunked(setting)
        limit_bytes, device_limit_bytes = host_limit_bytes(setting), self.device_limit_bytes(setting)
        while True:
            try:
                problem = self.problem(setting, limit_bytes=limit_bytes, device_limit_bytes=device_limit_bytes)
                return make_plan(problem, trades=trades)
            except DoesNotFit as failure:
                if failure.is_gpu_memory:
                    assert device_limit_bytes is not None
                    device_limit_bytes += failure.shortfall_bytes
                else:
                    limit_bytes += failure.shortfall_bytes

    def chunk_bytes(self, setting: Setting) -> int:
        """The logits that a run with this setting would compute at once if it began now."""
        if setting.chunk_bytes is not None:
            return setting.chunk_bytes
        setting = setting.of_full_rows  # chosen before the data is known
        limit_bytes, device_limit_bytes = host_limit_bytes(setting), self.device_limit_bytes(setting)
        problem = self.problem(setting, limit_bytes=limit_bytes, device_limit_bytes=device_limit_bytes)
        estimate = (self.estimate or self.profile).of_tokens(setting.workload.micro_batch_tokens)
        return best_chunk(replace(problem, profile=estimate))

    def problem(self, setting: Setting, *, limit_bytes: int, device_limit_bytes: int | None = None) -> Problem:
        """What a plan for this setting solves within these limits on host and GPU memory."""
        decisions = self.decisions
        return Problem(
            spec=self.spec,
            workload=setting.workload,
            profile=self.profile.of_tokens(setting.workload.micro_batch_tokens),
            hardware=setting.share,
            decisions=replace(
                decisions,
                holds_gradients=decisions.overwrites or (decisions.holds_gradients and setting.clips),
                host_limit_bytes=limit_bytes,
                device_limit_bytes=device_limit_bytes,
                wear=setting.wear,
            ),
            process_bytes=self.process_bytes,
            rank_slice=rank_slice_of(setting, self.spec),
        )

    def chunked(self, setting: Setting) -> Setting:
        """The setting with the chunks of the head that it names, or that the plan chooses."""
        chunk_bytes = self.chunk_bytes(setting)
        workload = with_chunk(self.spec, setting.workload, chunk_bytes)
        return replace(setting, chunk_bytes=chunk_bytes, workload=workload)

    def device_limit_bytes(self, setting: Setting) -> int | None:
        """What a plan may use of the limit that the user set, else the GPU's memory less a margin; None for a CPU."""
        wanted_bytes = self.decisions.device_limit_bytes
        if setting.share.link is None:
            return wanted_bytes
        if wanted_bytes is not None:
            return plannable_gpu_bytes(wanted_bytes)
        memory_bytes = setting.share.gpu.memory_bytes
        return memory_bytes - margin_bytes(memory_bytes)


def rank_slice_of(setting: Setting, spec: ModelSpec) -> RankSlice:
    """Return the slice of the rank that is planned: the one that stores most."""
    return fullest_slice(spec.blocks, setting.layout.num_ranks)


def host_limit_bytes(setting: Setting) -> int:
    """The limit that the user set, else the available host memory less a margin."""
    if setting.host_limit_bytes is not None:
        return setting.host_limit_bytes
    host = setting.share.host
    return max(0, host.available_bytes - margin_bytes(host.memory_bytes))


def more_space(spec: ModelSpec, *, num_ranks: int, has_files: bool = True) -> str:
    """What to do where a store does not fit. Several ranks have no `durability: none`. `has_files`: the weights are not
    drawn."""
    more = "name more directories in storage.paths"
    frozen = [block for block in spec.blocks if not block.is_trained and block.dtype != "uint8"]
    may_stay = has_files and not any(block.is_in_files for block in frozen)
    if may_stay and sum(block.compute_bytes for block in frozen) > sum(block.record_bytes for block in spec.blocks):
        return f"{more}, or leave the frozen weights in the base model's files: base_storage: in_place"
    return more if num_ranks > 1 else f"{more}, or halve the need with storage.durability: none"


def _forecast(plan: Plan, setting: Setting, spec: ModelSpec, *, device_limit_bytes: int | None) -> Forecast:
    keys = ", ".join(setting.step_keys)
    tiers = [
        Tier(
            name="RAM",
            need_bytes=plan.memory.total,
            have_bytes=host_limit_bytes(setting),
            remedy=f"raise limits.host_memory, or lower {keys} or sequence_len",
        ),
        Tier(
            name="NVMe",
            need_bytes=plan.nvme_bytes,
            have_bytes=setting.share.nvme.free_bytes,
            remedy=more_space(spec, num_ranks=setting.layout.num_ranks),
        ),
    ]
    if device_limit_bytes is not None:
        remedy = f"raise limits.gpu_memory, or lower {setting.step_keys[0]} or sequence_len"
        gpu = Tier(name="GPU", need_bytes=plan.memory.device, have_bytes=device_limit_bytes, remedy=remedy)
        tiers.insert(0, gpu)
    prediction = replace(plan, time=plan.time.with_update_in_backward)
    return Forecast(prediction=prediction, setting=setting, tiers=tuple(tiers))
