"""Forecasts under the paper's equations (`cost_model: paper`). Pure.

The paper has no micro-batches: all rows of a step are one batch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from ratel_cli.errors import BadInput
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.papers.in_memory import InMemoryModel
from ratel_cli.papers.largest import Depth, TierBytes, deepest, need
from ratel_cli.papers.memferry_costs import weight_uses
from ratel_cli.papers.memferry_forecast import DirectForecast, direct_forecast
from ratel_cli.papers.prefix import Search, SwappableOperator, search
from ratel_cli.papers.ratel import (
    STATE_BYTES,
    WEIGHT_BYTES,
    PaperEquations,
    PaperHardware,
    PaperShape,
)
from ratel_cli.planning.forecast.forecast import Forecast, Setting, Tier
from ratel_cli.planning.profile.activations import offload_bytes
from ratel_cli.planning.profile.analytic import analytic_profile, spec_from_shape
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import ActivationPolicy, Workload
from ratel_cli.planning.search.prediction import Prediction, SwappedOperator
from ratel_cli.planning.search.split import SplitRate
from ratel_cli.planning.time.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperForecaster:
    """One GPT-type model."""

    name: str
    shape: PaperShape
    """Its batch is replaced by each setting's."""
    gpu_limit_bytes: int | None = None
    """GPU memory that the user allows; None is all of it."""
    activations: ActivationPolicy = "auto"
    """What is swapped; `auto` is the best prefix."""

    def rate(self, setting: Setting) -> SplitRate:
        """See `Forecaster`."""
        return self.forecast(setting).split_rate

    def forecast(self, setting: Setting) -> Forecast:
        """The best prefix by benefit, or that of `activations`. Raises BadInput for a machine without a link, which the
        equations need."""
        equations = self.equations(setting)
        shape = equations.shape
        found = search(equations, available_bytes=shape.activation_bytes if self.activations == "keep" else None)
        count = _num_swapped(found, self.activations)
        point = found.points[count]
        time = equations.time(
            swapped_bytes=point.swapped_bytes,
            spilled_bytes=point.spilled_bytes,
            recomputed_flops=point.recomputed_flops,
        )
        needed = need(shape)
        weight_bytes, state_bytes = WEIGHT_BYTES * shape.num_parameters, STATE_BYTES * shape.num_parameters
        offloaded = offload_bytes(point.swapped_bytes, spilled_bytes=point.spilled_bytes)
        traffic = Traffic(
            forward_read_bytes=weight_bytes, backward_read_bytes=state_bytes, backward_written_bytes=state_bytes
        )
        prediction = Prediction(
            cost_model="paper",
            source="analytic",
            model_name=self.name,
            num_parameters=shape.num_parameters,
            num_blocks=shape.num_layers,
            workload=setting.workload,
            flops_forward=shape.flops_forward,
            flops_recomputed=point.recomputed_flops,
            swappable_bytes=shape.activation_bytes,
            inter_block_bytes=shape.inter_block_bytes,
            swapped=tuple(_swapped(operator) for operator in found.swapped(count)),
            offloaded=offloaded,
            case=found.case,
            traffic=traffic.with_offloaded(offloaded),
            time=time,
            bottleneck="nvme" if time.bottleneck.startswith("nvme") else time.bottleneck,
            gpu_bytes=needed.gpu_bytes,
            gpu_activation_bytes=shape.activation_bytes // shape.num_layers,
            host_bytes=needed.host_bytes,
            nvme_bytes=needed.nvme_bytes,
            curve=tuple(_curve(found, count)),
        )
        kept_bytes = max(0, offloaded.host_bytes - equations.available_bytes)
        return Forecast(prediction=prediction, setting=setting, tiers=self._tiers(shape, setting, kept_bytes))

    def with_activations(self, activations: ActivationPolicy) -> PaperForecaster:
        """Return this forecaster with this choice of what is swapped."""
        return replace(self, activations=activations)

    def equations(self, setting: Setting) -> PaperEquations:
        """Eq. 1 to 5 of the paper. Raises BadInput for a machine without a link."""
        workload = setting.workload
        rows = workload.micro_batch_size * workload.num_micro_batches
        shape = replace(self.shape, batch_size=rows, sequence_len=workload.sequence_len)
        return PaperEquations(shape=shape, hardware=_hardware(shape, setting))

    def in_memory(self, setting: Setting) -> InMemoryModel:
        """The model by the paper's counts: 2 bytes of weights and of gradients for each of P parameters, 34 b s h of
        activations in the layer that computes. All operators are recomputed, as Eq. 5 has it."""
        shape = self.equations(setting).shape
        spec, profile, workload = self.as_spec(setting)
        all_recomputed = tuple(replace(each, flops_recomputed=each.flops_forward) for each in profile.profiles)
        weight_bytes = WEIGHT_BYTES * shape.num_parameters
        return InMemoryModel(
            uses=weight_uses(
                spec,
                replace(profile, profiles=all_recomputed),
                workload,
                setting.hardware,
                is_paper=True,
                recomputes=True,
            ),
            hardware=setting.hardware,
            num_micro_batches=1,
            num_trained=shape.num_parameters,
            weight_bytes=weight_bytes,
            updated_bytes=weight_bytes,
            gradient_bytes=weight_bytes,
            largest_gradient_bytes=max(segment.gradient_bytes for segment in spec.segments),
            activation_bytes=shape.inter_block_bytes + shape.activation_bytes // shape.num_layers,
            recomputed_flops=sum(each.flops * len(each.blocks) for each in shape.operators),
            gpu_bytes=self._gpu_bytes(setting),
            host_bytes=_host_bytes(setting),
        )

    def direct(self, setting: Setting) -> DirectForecast | None:
        """What reading weights in place would give by MemFerry's equations; None where the CPU computes."""
        spec, profile, workload = self.as_spec(setting)
        return direct_forecast(spec, profile, workload, setting.hardware, is_paper=True)

    def as_spec(self, setting: Setting) -> tuple[ModelSpec, ModelProfile, Workload]:
        """The shape as a model with parameters, its costs, and the step: one batch of all rows."""
        shape = self.equations(setting).shape
        spec = spec_from_shape(
            name=self.name,
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
        )
        step = Workload(micro_batch_size=shape.batch_size, num_micro_batches=1, sequence_len=shape.sequence_len)
        traits = LayerTraits(num_heads=shape.num_heads, head_dim=shape.hidden_size // shape.num_heads)
        return spec, analytic_profile(spec, step, traits=traits), step

    def deepest(self, setting: Setting) -> Depth | None:
        """The depth by the rules of papers/largest.py."""
        shape = self.equations(setting).shape
        have = {tier.name: tier.have_bytes for tier in self._tiers(shape, setting)}
        found = deepest(shape, TierBytes(gpu_bytes=have["GPU"], host_bytes=have["RAM"], nvme_bytes=have["NVMe"]))
        return None if found is None else Depth(num_layers=found.num_layers, num_parameters=found.num_parameters)

    def _tiers(self, shape: PaperShape, setting: Setting, kept_bytes: int = 0) -> tuple[Tier, ...]:
        """`kept_bytes`: activations that are to stay in host memory and do not fit into what it has for them."""
        hardware, needed = setting.hardware, need(shape)
        host_bytes = _host_bytes(setting)
        return (
            Tier(
                name="GPU",
                need_bytes=needed.gpu_bytes,
                have_bytes=self._gpu_bytes(setting),
                remedy="lower micro_batch_size or sequence_len",
            ),
            Tier(
                name="RAM",
                need_bytes=max(needed.host_bytes, host_bytes) + kept_bytes if kept_bytes else needed.host_bytes,
                have_bytes=host_bytes,
                remedy="raise limits.host_memory",
            ),
            Tier(
                name="NVMe",
                need_bytes=needed.nvme_bytes,
                have_bytes=hardware.nvme.free_bytes,
                remedy="add drives",
            ),
        )

    def _gpu_bytes(self, setting: Setting) -> int:
        return self.gpu_limit_bytes or setting.hardware.gpu.memory_bytes


def _host_bytes(setting: Setting) -> int:
    return setting.host_limit_bytes or setting.hardware.host.memory_bytes


def _hardware(shape: PaperShape, setting: Setting) -> PaperHardware:
    """The machine in the paper's words.

    MEM_avail is what the hardware file says or, if the user set a limit, what buffers leave of the limit.
    """
    hardware = setting.hardware
    if hardware.link is None:
        raise BadInput(
            "`cost_model: paper` needs a machine with a GPU, but this one has no `link` to a GPU",
            "give a hardware file: --hardware configs/hardware/paper-4090-12ssd.yaml",
        )
    host = hardware.host
    available_bytes = host.available_bytes if host.activation_bytes is None else host.activation_bytes
    if setting.host_limit_bytes is not None:
        available_bytes = max(0, setting.host_limit_bytes - need(shape).host_bytes)
    return PaperHardware(
        flops_per_second=hardware.gpu.flops_per_second,
        link_bytes_per_second=min(hardware.link.to_gpu_bytes_per_second, hardware.link.from_gpu_bytes_per_second),
        read_bytes_per_second=hardware.nvme.read_bytes_per_second,
        write_bytes_per_second=hardware.nvme.write_bytes_per_second,
        available_bytes=available_bytes,
    )


def _num_swapped(found: Search, activations: ActivationPolicy) -> int:
    """How many elements the user's choice swaps."""
    match activations:
        case "auto":
            return found.least()
        case "recompute" | "static":
            return 0
        case "keep" | "swap_all":
            return len(found.points) - 1
        case share:
            sizes = [point.swapped_bytes - found.points[0].swapped_bytes for point in found.points]
            return bisect_left(sizes, int(share * sizes[-1]))


def _swapped(operator: SwappableOperator) -> SwappedOperator:
    blocks = len(operator.blocks)
    return SwappedOperator(
        operator=operator.name,
        blocks=blocks,
        bytes=blocks * operator.num_bytes,
        flops=blocks * operator.flops,
        seconds=None,
        benefit=operator.benefit,
    )


def _curve(found: Search, count: int) -> list[tuple[int, float]]:
    """Bytes swapped and seconds after each whole operator, and at the chosen point."""
    counts, end = {0, count}, 0
    for operator in found.operators:
        end += len(operator.blocks)
        counts.add(end)
    return [(found.points[each].swapped_bytes, found.points[each].seconds) for each in sorted(counts)]
