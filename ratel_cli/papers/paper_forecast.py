"""Forecasts under the paper's equations (`cost_model: paper`). Pure.

The paper has no micro-batches: all rows of a step are one batch.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from ratel_cli.errors import BadInput
from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.papers.memferry_costs import weight_uses
from ratel_cli.papers.memferry_forecast import DirectForecast, direct_forecast
from ratel_cli.papers.prefix import Search, SwappableOperator, search
from ratel_cli.papers.ratel import Depth, PaperEquations, PaperHardware, PaperShape, TierBytes, deepest, need
from ratel_cli.papers.rivals import InMemoryModel
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
        offloaded = offload_bytes(point.swapped_bytes, spilled_bytes=point.spilled_bytes)
        traffic = Traffic(
            forward_read_bytes=shape.weight_bytes,
            backward_read_bytes=shape.state_bytes,
            backward_written_bytes=shape.state_bytes,
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

    def chunk_bytes(self, setting: Setting) -> None:
        """See `Forecaster`."""

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
        shape, have = self.equations(setting).shape, self._have(setting)
        spec, profile, workload = self.as_spec(setting)
        all_recomputed = tuple(replace(each, flops_recomputed=each.flops_forward) for each in profile.profiles)
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
            weight_bytes=shape.weight_bytes,
            updated_bytes=shape.weight_bytes,
            gradient_bytes=shape.weight_bytes,
            largest_gradient_bytes=max(segment.gradient_bytes for segment in spec.segments),
            activation_bytes=shape.inter_block_bytes + shape.activation_bytes // shape.num_layers,
            recomputed_flops=sum(each.flops * len(each.blocks) for each in shape.operators),
            gpu_bytes=have.gpu_bytes,
            host_bytes=have.host_bytes,
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
        """The depth by the rules of `ratel.py`."""
        found = deepest(self.equations(setting).shape, self._have(setting))
        return None if found is None else Depth(num_layers=found.num_layers, num_parameters=found.num_parameters)

    def _tiers(self, shape: PaperShape, setting: Setting, kept_bytes: int = 0) -> tuple[Tier, ...]:
        """`kept_bytes`: activations that are to stay in host memory and do not fit into what it has for them."""
        have, needed = self._have(setting), need(shape)
        return (
            Tier(
                name="GPU",
                need_bytes=needed.gpu_bytes,
                have_bytes=have.gpu_bytes,
                remedy="lower micro_batch_size or sequence_len",
            ),
            Tier(
                name="RAM",
                need_bytes=max(needed.host_bytes, have.host_bytes) + kept_bytes if kept_bytes else needed.host_bytes,
                have_bytes=have.host_bytes,
                remedy="raise limits.host_memory",
            ),
            Tier(
                name="NVMe",
                need_bytes=needed.nvme_bytes,
                have_bytes=have.nvme_bytes,
                remedy="add drives",
            ),
        )

    def _have(self, setting: Setting) -> TierBytes:
        have = tier_bytes(setting)
        return replace(have, gpu_bytes=self.gpu_limit_bytes or have.gpu_bytes)


def tier_bytes(setting: Setting) -> TierBytes:
    """What the machine has in each tier, within the limit on host memory."""
    hardware = setting.hardware
    return TierBytes(
        gpu_bytes=hardware.gpu.memory_bytes,
        host_bytes=setting.host_limit_bytes or hardware.host.memory_bytes,
        nvme_bytes=hardware.nvme.free_bytes,
    )


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
