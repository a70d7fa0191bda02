"""Models under Ratel's cost model, and settings, for tests of forecasts."""

from __future__ import annotations

from pathlib import Path

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.values.spec import LayerTraits
from ratel_cli.planning.forecast.forecast import Setting
from ratel_cli.planning.forecast.ratel_forecast import RatelForecaster
from ratel_cli.planning.profile.analytic import analytic_profile, spec_from_shape
from ratel_cli.planning.profile.placement import ActivationPolicy, Overlap, Workload
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.run.files.hardware_file import load_hardware
from ratel_cli.units import GIB

CONFIGS = Path(__file__).parents[2] / "configs"


def paper_machine(name: str = "paper-4090-12ssd") -> HardwareProfile:
    return load_hardware(CONFIGS / "hardware" / f"{name}.yaml")


def workload(*, rows: int = 4, number: int = 1, sequence_len: int = 1024) -> Workload:
    return Workload(micro_batch_size=rows, num_micro_batches=number, sequence_len=sequence_len)


def setting(
    hardware: HardwareProfile | None = None,
    *,
    rows: int = 4,
    number: int = 1,
    host_limit_bytes: int | None = 64 * GIB,
    num_steps: int | None = None,
) -> Setting:
    return Setting(
        workload=workload(rows=rows, number=number),
        hardware=hardware or paper_machine(),
        host_limit_bytes=host_limit_bytes,
        num_steps=num_steps,
    )


def ratel_forecaster(
    *,
    num_layers: int = 6,
    hidden_size: int = 1024,
    rows: int = 4,
    holds_gradients: bool = True,
    activations: ActivationPolicy = "auto",
    overlap: Overlap = "optimized",
    device_limit_bytes: int | None = None,
) -> RatelForecaster:
    """A GPT, its costs estimated for micro-batches of `rows` rows."""
    spec = spec_from_shape(name="gpt", num_layers=num_layers, hidden_size=hidden_size, vocab_size=5000)
    traits = LayerTraits(num_heads=8, head_dim=hidden_size // 8)
    return RatelForecaster(
        spec=spec,
        profile=analytic_profile(spec, setting(rows=rows).workload, traits=traits),
        decisions=Decisions(
            holds_gradients=holds_gradients,
            num_slots=2,
            host_limit_bytes=0,
            device_limit_bytes=device_limit_bytes,
            activations=activations,
            overlap=overlap,
        ),
        process_bytes=GIB // 2,
    )
