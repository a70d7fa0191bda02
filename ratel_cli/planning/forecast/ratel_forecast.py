"""Forecasts of what Ratel itself does: plans for a machine that need not be this one. Pure.

A plan for twice the micro-batch takes the profile twice: everything in it is taken to be proportional to the rows of a
micro-batch, as if the device were as busy with half of them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import GPU_CONTEXT_BYTES, margin_bytes, plannable_gpu_bytes
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.direct.costs import weight_uses
from ratel_cli.planning.forecast.forecast import Depth, Forecast, Setting, Tier
from ratel_cli.planning.forecast.ratel_equations import RatelEquations
from ratel_cli.planning.memory.capacity import check_device_memory, notes_bytes
from ratel_cli.planning.memory.gpu_memory import activation_bytes
from ratel_cli.planning.papers.in_memory import InMemoryModel
from ratel_cli.planning.papers.prefix import Equations
from ratel_cli.planning.profile.activations import head_chunk_tokens, logits_bytes
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import LEAST_UNITS, ActivationPolicy, Placement
from ratel_cli.planning.search.head_chunk import best_chunk, with_chunk
from ratel_cli.planning.search.plan import Plan, make_plan
from ratel_cli.planning.search.problem import Decisions, Problem
from ratel_cli.planning.search.split import SplitRate
from ratel_cli.schedule.segments import Segment
from ratel_cli.sizes import PAGE_BYTES
from ratel_cli.store.layout import RankSlice
from ratel_cli.units import align_up


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
        return _forecast(self.plan(setting), setting, self.spec, device_limit_bytes=self._device_limit_bytes(setting))

    def rate(self, setting: Setting) -> SplitRate:
        """See `Forecaster`. What other rules for wear would choose is not looked for."""
        plan = self.plan(setting, trades=False)
        limit_bytes = self._device_limit_bytes(setting)
        return _forecast(plan, setting, self.spec, device_limit_bytes=limit_bytes).split_rate

    def with_activations(self, activations: ActivationPolicy) -> RatelForecaster:
        """See `Forecaster`."""
        return replace(self, decisions=replace(self.decisions, activations=activations))

    def plan(self, setting: Setting, *, trades: bool = True) -> Plan:
        """The plan for this setting. Where the run does not fit, limits are raised until it does. `trades` as of
        `make_plan`."""
        setting = self._chunked(setting)
        limit_bytes, device_limit_bytes = host_limit_bytes(setting), self._device_limit_bytes(setting)
        while True:
            try:
                problem = self._problem(setting, limit_bytes=limit_bytes, device_limit_bytes=device_limit_bytes)
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
        limit_bytes, device_limit_bytes = host_limit_bytes(setting), self._device_limit_bytes(setting)
        problem = self._problem(setting, limit_bytes=limit_bytes, device_limit_bytes=device_limit_bytes)
        estimate = (self.estimate or self.profile).of_tokens(setting.workload.micro_batch_tokens)
        return best_chunk(replace(problem, profile=estimate))

    def equations(self, setting: Setting) -> Equations:
        """Equations whose transfers run as far ahead as planned.

        Memory that the plan gives to resident weights and states is available to activations.
        """
        setting = self._chunked(setting)
        plan = self.plan(setting)
        problem = self._problem(setting, limit_bytes=plan.decisions.host_limit_bytes)
        problem = replace(problem, gpu_holds_head=plan.placement.gpu_holds_head)
        bare = replace(
            plan.placement,
            resident_weights=frozenset(),
            resident_states=frozenset(),
            spilled_units=self._spillable_units(setting),
            gpu_units_from=None,
        )
        activation_bytes = problem.offload(0, spilled_units=bare.spilled_units).memory_bytes
        try:
            unused_bytes = problem.decisions.host_limit_bytes - problem.evaluate(bare).memory.total
        except DoesNotFit as failure:  # the plan fits because the last layer's activations are on the GPU
            unused_bytes = -failure.shortfall_bytes
        return RatelEquations(
            problem=problem,
            placement=bare,
            available_bytes=unused_bytes + activation_bytes + plan.offloaded.gpu_bytes,
            gpu_bytes=plan.offloaded.gpu_bytes,
            spilled_segments=plan.spilled_segments,
        )

    def in_memory(self, setting: Setting) -> InMemoryModel:
        """The model as this config would train it: its dtypes, and what is frozen. The limits are those of a plan.

        The head computes as fast as in the plan, and takes as little GPU memory as it can.
        """
        setting = self._chunked(setting)
        spec, profile, workload = self.spec, self._profile(setting), setting.workload
        inputs_alone = self._problem(setting, limit_bytes=0).offload(0)
        layers = [profile.profiles[kind] for kind in profile.layers]
        logits = logits_bytes(spec, head_chunk_tokens(spec, replace(workload, chunk_tokens=None)))
        head_bytes = max(profile.norm_held_bytes + logits, profile.norm_bytes)
        computing_bytes = max(activation_bytes(profile, inputs_alone, LEAST_UNITS), head_bytes)
        device_limit_bytes = self._device_limit_bytes(setting) or 0
        return InMemoryModel(
            uses=weight_uses(spec, profile, workload, setting.share, is_paper=False),
            hardware=setting.share,
            num_micro_batches=workload.num_micro_batches,
            num_trained=spec.trained_elements,
            weight_bytes=sum(segment.own_bytes for segment in spec.segments),
            updated_bytes=sum(segment.updated_bytes for segment in spec.segments),
            gradient_bytes=sum(segment.gradient_bytes for segment in spec.segments),
            largest_gradient_bytes=max(segment.gradient_bytes for segment in spec.segments),
            activation_bytes=sum(each.input_bytes for each in layers[:-1]) + computing_bytes,
            recomputed_flops=workload.num_micro_batches * sum(each.flops_recomputed for each in layers),
            gpu_bytes=max(0, device_limit_bytes - GPU_CONTEXT_BYTES),
            host_bytes=max(0, host_limit_bytes(setting) - self.process_bytes),
        )

    def deepest(self, setting: Setting) -> Depth | None:
        """The most layers like the last one that fit. Everything that can be lies on NVMe, so NVMe bounds them, and
        memory for what a step notes of each."""

        def stored_bytes(segment: Segment) -> int:
            holds = self.decisions.holds_gradients or self.decisions.overlap == "separate"
            frozen_bytes = segment.compute_bytes - segment.updated_bytes
            records_bytes = self.decisions.num_slots * segment.record_bytes + frozen_bytes
            return records_bytes + (segment.gradient_bytes if holds else 0)

        number, layer = setting.workload.num_micro_batches, self.spec.layers[-1]
        unit_bytes = align_up(self._profile(setting).profiles[-1].input_bytes, PAGE_BYTES)
        outside_bytes = stored_bytes(self.spec.embedding) + stored_bytes(self.spec.head)
        available_bytes = setting.share.nvme.free_bytes - outside_bytes
        most_layers = available_bytes // (stored_bytes(layer) + number * unit_bytes)
        choices = range(1, most_layers + 1)
        num_layers = bisect_right(choices, 0, key=lambda depth: 0 if self._has_memory(setting, depth) else 1)
        if num_layers < 1:
            return None
        parameters = self.spec.num_parameters + (num_layers - self.spec.num_layers) * layer.num_parameters
        return Depth(num_layers=num_layers, num_parameters=parameters)

    def _has_memory(self, setting: Setting, num_layers: int) -> bool:
        """Whether the placement that takes the least memory fits with this many layers. Apart from what a step notes of
        each it takes the same for every depth."""
        device_limit_bytes = self._device_limit_bytes(setting)
        layer_bytes = notes_bytes(self.spec.layers[-1:], setting.workload, num_layers=1)
        limit_bytes = host_limit_bytes(setting) - (num_layers - self.spec.num_layers) * layer_bytes
        problem = self._problem(setting, limit_bytes=limit_bytes, device_limit_bytes=device_limit_bytes)
        problem = problem.in_least_gpu_memory
        try:
            memory = problem.evaluate(Placement(spilled_units=self._spillable_units(setting))).memory
            check_device_memory(memory, device_limit_bytes)
        except DoesNotFit:
            return False
        return True

    def _spillable_units(self, setting: Setting) -> int:
        """The units of all layers but the last."""
        return (self.spec.num_layers - 1) * setting.workload.num_micro_batches

    def _problem(self, setting: Setting, *, limit_bytes: int, device_limit_bytes: int | None = None) -> Problem:
        decisions = self.decisions
        return Problem(
            spec=self.spec,
            workload=setting.workload,
            profile=self._profile(setting),
            hardware=setting.share,
            decisions=replace(
                decisions,
                holds_gradients=decisions.overwrites or (decisions.holds_gradients and setting.clips),
                host_limit_bytes=limit_bytes,
                device_limit_bytes=device_limit_bytes,
                wear=setting.wear,
            ),
            process_bytes=self.process_bytes,
            rank_slice=rank_slice_of(setting),
        )

    def _chunked(self, setting: Setting) -> Setting:
        """The setting with the chunks of the head that it names, or that the plan chooses."""
        chunk_bytes = self.chunk_bytes(setting)
        workload = with_chunk(self.spec, setting.workload, chunk_bytes)
        return replace(setting, chunk_bytes=chunk_bytes, workload=workload)

    def _profile(self, setting: Setting) -> ModelProfile:
        return self.profile.of_tokens(setting.workload.micro_batch_tokens)

    def _device_limit_bytes(self, setting: Setting) -> int | None:
        """What a plan may use of the limit that the user set, else the GPU's memory less a margin; None for a CPU."""
        wanted_bytes = self.decisions.device_limit_bytes
        if setting.share.link is None:
            return wanted_bytes
        if wanted_bytes is not None:
            return plannable_gpu_bytes(wanted_bytes)
        memory_bytes = setting.share.gpu.memory_bytes
        return memory_bytes - margin_bytes(memory_bytes)


def rank_slice_of(setting: Setting) -> RankSlice:
    """Return the slice of the rank that is planned: the last one, which has no less of any block than another."""
    return RankSlice(setting.layout.num_ranks - 1, setting.layout.num_ranks)


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
