"""What would help: which changes are tried, and which are printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.planning.forecast.advice import Advice, advise, server_dollars, with_drives
from ratel_cli.planning.forecast.forecast import Setting
from ratel_cli.planning.placement import Workload
from ratel_cli.units import GIB
from tests.hardware.profiles import WITH_GPU

SETTING = Setting(workload=Workload(micro_batch_size=2, num_micro_batches=3, sequence_len=64), hardware=WITH_GPU)


def changes(advices: tuple[Advice, ...]) -> list[str]:
    return [advice.change for advice in advices]


def test_each_change_is_tried_by_itself() -> None:
    tried: list[Setting] = []

    def note(setting: Setting) -> float:
        tried.append(setting)
        return 1.0

    assert advise(SETTING, note) == ()
    now, drive, memory, rows, number = tried
    assert now is SETTING
    assert drive == replace(SETTING, hardware=with_drives(WITH_GPU, 3))
    assert memory.workload == SETTING.workload
    assert memory.hardware.host.memory_bytes == 256 * GIB
    assert memory.hardware.host.available_bytes == 228 * GIB
    assert memory.host_limit_bytes is None
    assert rows == replace(SETTING, workload=replace(SETTING.workload, micro_batch_size=4))
    assert number == replace(SETTING, workload=replace(SETTING.workload, num_micro_batches=6))


def test_a_limit_of_the_user_s_is_doubled_with_the_memory() -> None:
    limited = replace(SETTING, host_limit_bytes=8 * GIB)
    advices = advise(limited, lambda setting: float(setting.host_limit_bytes or 0))
    assert advices == (Advice(change="twice the RAM, 16.0 GiB", tokens_per_second=16 * GIB, gain=1.0),)


def test_the_greatest_gain_comes_first_and_small_ones_are_left_out() -> None:
    def rate(setting: Setting) -> float:
        if setting.hardware.nvme.num_devices == 3:
            return 102.0
        if setting.hardware.host.memory_bytes > WITH_GPU.host.memory_bytes:
            return 101.0
        return {(2, 3): 100.0, (4, 3): 150.0, (2, 6): 99.0}[
            setting.workload.micro_batch_size, setting.workload.num_micro_batches
        ]

    advices = advise(SETTING, rate)
    assert changes(advices) == ["micro_batch_size: 4", "one more SSD, 3 in all"]
    assert [advice.gain for advice in advices] == pytest.approx([0.5, 0.02])


def test_what_does_not_fit_is_no_help() -> None:
    assert advise(SETTING, lambda setting: 1.0 if setting is SETTING else None) == ()
    assert advise(SETTING, lambda setting: None if setting is SETTING else 1.0) == ()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_drives_have_their_share(count: int) -> None:
    nvme, before = with_drives(WITH_GPU, count).nvme, WITH_GPU.nvme
    assert nvme.num_devices == count
    assert nvme.read_bytes_per_second == count * before.read_bytes_per_second / 2
    assert nvme.write_bytes_per_second == count * before.write_bytes_per_second / 2
    assert nvme.mixed_bytes_per_second == count * before.mixed_bytes_per_second / 2
    assert nvme.free_bytes == count * before.free_bytes // 2
    assert nvme.endurance_tb_written == count * 3500.0


def test_an_unknown_rating_stays_unknown() -> None:
    unrated = replace(WITH_GPU, nvme=replace(WITH_GPU.nvme, endurance_tb_written=None))
    assert with_drives(unrated, 5).nvme.endurance_tb_written is None


@pytest.mark.parametrize(("num_gpus", "num_ssds"), [(0, 0), (1, 12), (4, 1), (4, 6), (4, 12)])
def test_price_of_a_server(num_gpus: int, num_ssds: int) -> None:
    """Ratel, Table VII."""
    assert server_dollars(num_gpus=num_gpus, num_ssds=num_ssds) == 14_098 + 1_600 * num_gpus + 308 * num_ssds
