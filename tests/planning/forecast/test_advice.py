"""What would help: which changes are tried, and which are printed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from ratel_cli.planning.forecast.advice import Advice, adapter_advice, advise, best_first, other_split, with_drives
from ratel_cli.planning.forecast.forecast import Forecast, Setting
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.split import SplitRate
from ratel_cli.units import GIB
from tests.hardware.profiles import WITH_GPU

SETTING = Setting(workload=Workload(micro_batch_size=2, num_micro_batches=3, sequence_len=64), hardware=WITH_GPU)


def changes(advices: tuple[Advice, ...]) -> list[str]:
    return [advice.change for advice in advices]


def rate_of(setting: Setting, tokens_per_second: float | None) -> SplitRate:
    """None: it does not fit."""
    return SplitRate(
        workload=setting.workload,
        tokens_per_second=tokens_per_second or 50.0,
        shortfall_bytes=0 if tokens_per_second else GIB,
    )


def test_each_change_is_tried_by_itself() -> None:
    tried: list[Setting] = []

    def note(setting: Setting) -> SplitRate:
        tried.append(setting)
        return rate_of(setting, 1.0)

    assert advise(SETTING, note) == ()
    now, again, *splits, drive, memory, rows, number, unclipped = tried
    assert now is again is SETTING
    sizes = [(each.workload.micro_batch_size, each.workload.num_micro_batches) for each in splits]
    assert sizes == [(1, 6), (2, 3), (3, 2), (6, 1)]
    assert all(replace(each, workload=SETTING.workload) == SETTING for each in splits)
    assert drive == replace(SETTING, hardware=with_drives(WITH_GPU, 3))
    assert memory.workload == SETTING.workload
    assert memory.hardware.host.memory_bytes == 256 * GIB
    assert memory.hardware.host.available_bytes == 228 * GIB
    assert memory.host_limit_bytes is None
    assert rows == replace(SETTING, workload=replace(SETTING.workload, micro_batch_size=4))
    assert number == replace(SETTING, workload=replace(SETTING.workload, num_micro_batches=6))
    assert unclipped == replace(SETTING, clips=False)


def test_the_heads_chunks_stay_where_micro_batches_do() -> None:
    tried: list[Setting] = []

    def note(setting: Setting) -> SplitRate:
        tried.append(setting)
        return rate_of(setting, 1.0)

    advise(SETTING, note, chunk_bytes=GIB)
    *_, drive, memory, rows, number, unclipped = tried
    assert {each.chunk_bytes for each in (drive, memory, number, unclipped)} == {GIB}
    assert rows.chunk_bytes is None, "twice the rows take twice the memory"


def test_advice_not_to_clip_says_that_it_changes_the_weights() -> None:
    [advice] = advise(SETTING, lambda setting: rate_of(setting, 100.0 if setting.clips else 150.0))
    assert advice.change == "max_grad_norm: null (no clipping: the result differs)"
    assert (advice.gain, advice.unclipped_gain) == (0.5, None)


def test_advice_not_to_clip_says_what_a_step_gains_that_is_not_clipped_anyway() -> None:
    """The plan's time is that of a clipped step, and most steps are not clipped."""

    def rate(setting: Setting) -> SplitRate:
        if setting.clips:
            return replace(rate_of(setting, 100.0), unclipped_tokens_per_second=125.0)
        return rate_of(setting, 150.0)

    [advice] = advise(SETTING, rate)
    assert advice.change == (
        "max_grad_norm: null (no clipping: the result differs; +20% over steps that need no clipping, +50% over "
        "clipped ones)"
    )
    assert (advice.gain, advice.unclipped_gain) == (0.5, pytest.approx(0.2))


def test_where_the_plan_chose_the_split_only_the_step_can_grow() -> None:
    planned = replace(SETTING, step_keys=("tokens_per_step",))
    advices = advise(planned, lambda setting: rate_of(setting, float(setting.workload.tokens)))
    assert changes(advices) == ["tokens_per_step: 768 (twice the tokens per step: the result differs)"]


def test_a_limit_of_the_user_s_is_doubled_with_the_memory() -> None:
    limited = replace(SETTING, host_limit_bytes=8 * GIB)
    advices = advise(limited, lambda setting: rate_of(setting, float(setting.host_limit_bytes or 0)))
    assert advices == (Advice(change="twice the RAM, 16.0 GiB", tokens_per_second=16 * GIB, gain=1.0),)


def test_the_greatest_gain_comes_first_and_small_ones_are_left_out() -> None:
    def rate(setting: Setting) -> SplitRate:
        known = {(2, 3): 100.0, (4, 3): 150.0, (2, 6): 99.0, (1, 6): 90.0, (3, 2): 110.0, (6, 1): 101.0}
        found = known[setting.workload.micro_batch_size, setting.workload.num_micro_batches]
        if setting.hardware.nvme.num_devices == 3:
            found = 102.0
        if setting.hardware.host.memory_bytes > WITH_GPU.host.memory_bytes:
            found = 101.0
        return rate_of(setting, found)

    advices = advise(SETTING, rate)
    assert changes(advices) == [
        "micro_batch_size: 4 (twice the tokens per step: the result differs)",
        "micro_batch_size: 3, gradient_accumulation_steps: 2 (the same tokens per step)",
        "one more SSD, 3 in all",
    ]
    assert [advice.gain for advice in advices] == pytest.approx([0.5, 0.1, 0.02])


def test_writing_more_is_advice_where_the_rule_for_wear_holds_it_back() -> None:
    def rate(setting: Setting) -> SplitRate:
        return rate_of(setting, 105.0 if setting.wear == "ignore" else 100.0)

    for wear in ("save", "balanced"):
        assert changes(advise(replace(SETTING, wear=wear), rate)) == ["storage.wear: ignore (more is written)"]
    assert advise(SETTING, rate) == ()


@pytest.mark.parametrize(
    ("rates", "wanted"),
    [
        ({4: 10.0, 2: 11.0, 1: 12.0, 8: 9.0}, 1),
        ({4: 10.0, 2: 11.0, 1: 10.5, 8: 9.0}, 2),
        ({4: 10.0, 2: 9.0, 1: 20.0, 8: 12.0}, 1),
        ({4: 10.0, 2: 10.05}, None),
        ({4: 10.0}, None),
        ({1: 3.0}, 1),
        ({2: 3.0, 1: 2.0}, 2),
        ({2: 3.0, 1: 3.01}, 2),
        ({8: 3.0}, 8),
        ({}, None),
    ],
)
def test_the_fastest_split_that_fits(rates: dict[int, float], wanted: int | None) -> None:
    """Of 8 rows in micro-batches of 4. What is not listed does not fit."""
    setting = replace(SETTING, workload=replace(SETTING.workload, micro_batch_size=4, num_micro_batches=2))

    def rate(each: Setting) -> SplitRate:
        workload = each.workload
        assert workload.micro_batch_size * workload.num_micro_batches == 8
        return rate_of(each, rates.get(workload.micro_batch_size))

    split = other_split(setting, rate)
    if wanted is None:
        assert split is None
        return
    assert split is not None
    assert split.change.startswith(f"micro_batch_size: {wanted}, gradient_accumulation_steps: {8 // wanted} (")
    assert split.tokens_per_second == rates[wanted]
    assert split.gain == pytest.approx(rates[wanted] / rates[4] - 1 if 4 in rates else 0.0)


def test_what_does_not_fit_is_no_help() -> None:
    def fits(setting: Setting, *, is_asked: bool) -> SplitRate:
        return rate_of(setting, 1.0 if (setting == SETTING) == is_asked else None)

    assert advise(SETTING, lambda setting: fits(setting, is_asked=True)) == ()
    [split] = advise(SETTING, lambda setting: fits(setting, is_asked=False))
    assert split.change.startswith("micro_batch_size: 6, "), "only a split helps what does not fit"


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


@pytest.mark.parametrize(
    ("times_faster", "times_less", "fits", "wanted"),
    [
        (1.94, 41.4, (True, True), "41 x less written, 1.9 x faster"),
        (1.94, 9.96, (True, True), "10.0 x less written, 1.9 x faster"),
        (1.04, 1234.6, (True, True), "1,235 x less written"),
        (0.9, 41.0, (True, True), "41 x less written"),
        (1.94, 41.0, (False, True), "41 x less written"),
        (1.94, 41.0, (True, False), None),
        (1.94, 1.0, (True, True), None),
    ],
)
def test_an_adapter_says_how_much_less_it_writes(
    times_faster: float, times_less: float, fits: tuple[bool, bool], wanted: str | None
) -> None:
    now = forecast_of(100.0, 10**12, fits=fits[0])
    then = forecast_of(100 * times_faster, int(10**12 / times_less), fits=fits[1])
    advice = adapter_advice(now, then, rank=16, tokens_per_second=50.0)
    if wanted is None:
        assert advice is None
        return
    assert advice is not None
    assert advice.change == f"adapter: lora (LoRA r=16: {wanted}; the result differs)"
    assert advice.tokens_per_second == pytest.approx(50 * times_faster)
    assert advice.gain == pytest.approx(times_faster - 1 if fits[0] else 0)
    assert advice.times_less_written == pytest.approx(times_less)
    assert best_first([replace(advice, gain=0.1), replace(advice, gain=0.3)])[0].gain == 0.3


def forecast_of(tokens_per_second: float, written_bytes: int, *, fits: bool) -> Forecast:
    traffic = SimpleNamespace(written_bytes=written_bytes)
    prediction = SimpleNamespace(tokens_per_second=tokens_per_second, traffic=traffic)
    return cast("Forecast", SimpleNamespace(prediction=prediction, fits=fits))
