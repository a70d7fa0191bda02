"""Forecasts of several ranks: the table of docs/planning.md, and what a rank has of a machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ratel_cli.console import RunLog
from ratel_cli.hardware.shares import RankLayout, share_of
from ratel_cli.hardware.spec import HardwareProfile, Link, Network
from ratel_cli.planning.forecast.forecast import Forecast
from ratel_cli.run.ask.plan_inputs import forecaster_of, setting_of
from ratel_cli.run.files.hardware_file import load_hardware
from ratel_cli.run.files.run_directory import read_config
from tests.planning.shapes import machine

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"\| gpt-(\w+) \| (\d+) x (\d+) \| (\d+) \| ([\d.]+) s \| (\d+) \|.*\|")
ROWS = [match.groups() for match in map(ROW.fullmatch, (ROOT / "docs/planning.md").read_text().splitlines()) if match]
"""Model, machines, ranks of each, sequences of each rank, seconds of a step, TFLOP/s of all."""


def forecast(model: str, layout: RankLayout, rows: int, network: float | None) -> Forecast:
    overrides = [f"micro_batch_size={rows}", "max_grad_norm=null"]
    config = read_config(ROOT / f"configs/models/gpt-{model}.yaml", RunLog(), overrides)
    hardware = load_hardware(ROOT / "configs/hardware/paper-4090-12ssd.yaml")
    if network is not None:
        hardware = replace(hardware, network=Network(bytes_per_second=network))
    forecaster = forecaster_of(config, hardware, name=model, log=RunLog())
    return forecaster.forecast(setting_of(config, hardware, layout=layout))


@pytest.mark.parametrize(("model", "machines", "on_machine", "rows", "seconds", "tflops"), ROWS)
def test_the_table_of_the_page(
    model: str, machines: str, on_machine: str, rows: str, seconds: str, tflops: str
) -> None:
    number, here = int(machines) * int(on_machine), int(on_machine)
    layout = RankLayout(num_ranks=number, on_machine=here, on_drives=here)
    found = forecast(model, layout, int(rows), 25e9 if int(machines) > 1 else None)
    assert found.fits
    assert f"{found.prediction.time.total:.1f}" == seconds
    assert f"{found.prediction.tflops_model:.0f}" == tflops


def test_the_table_has_the_paper_and_more() -> None:
    assert len(ROWS) == 5


def test_ranks_write_what_one_does() -> None:
    """State traffic is not multiplied by ranks (Ratel, section V-G)."""
    alone = forecast("6b", RankLayout(), 8, None).prediction.traffic.written_bytes
    of_four = forecast("6b", RankLayout(num_ranks=4, on_machine=4, on_drives=4), 8, None).prediction.traffic
    assert 4 * of_four.written_bytes == pytest.approx(alone, rel=1e-3)


def test_a_share_is_a_part_of_the_machine() -> None:
    whole = replace(machine(num_cores=8, memory_bytes_per_second=8e10), network=Network(bytes_per_second=7e9))
    share = share_of(whole, RankLayout(num_ranks=8, on_machine=4, on_drives=2))
    assert (share.host.num_cores, share.host.memory_bytes) == (2, whole.host.memory_bytes // 4)
    assert share.host.memory_bytes_per_second == 2e10
    assert share.nvme.read_bytes_per_second == whole.nvme.read_bytes_per_second / 2
    assert share.nvme.free_bytes == whole.nvme.free_bytes // 2
    # Four ranks send a seventh of what each sends to each of four others: 16 / 7 of it goes over the network.
    assert share.network == Network(bytes_per_second=pytest.approx(7e9 * 7 / 16))
    assert share_of(whole, RankLayout()) is whole


def test_ranks_of_one_machine_send_through_its_memory() -> None:
    whole = machine(num_cores=8, memory_bytes_per_second=8e10)
    share = share_of(whole, RankLayout(num_ranks=4, on_machine=4))
    assert share.network == Network(bytes_per_second=pytest.approx(8e10 / 4 / 4))
    assert share_of(machine(num_cores=8), RankLayout(num_ranks=4, on_machine=4)).network is None


@pytest.mark.parametrize(("num_sharing", "part"), [(1, 1), (2, 2), (8, 4)])
def test_gpus_below_one_root_complex_share_the_link(num_sharing: int, part: int) -> None:
    link = Link(
        to_gpu_bytes_per_second=2e10,
        from_gpu_bytes_per_second=3e10,
        both_bytes_per_second=4e10,
        num_sharing=num_sharing,
    )
    whole: HardwareProfile = replace(machine(), link=link)
    share = share_of(whole, RankLayout(num_ranks=4, on_machine=4)).link
    assert share is not None
    assert (share.to_gpu_bytes_per_second, share.both_bytes_per_second) == (2e10 / part, 4e10 / part)
