"""Times and rates from the steps after the recorded one: the median of all, without what their plan saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile
from ratel_cli.planning.profile.recorded import BlockSeconds
from ratel_cli.planning.time.refined import SeenStep, refined_hardware, refined_profile
from ratel_cli.planning.time.step_time import StageTime, StepTime
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU
from tests.planning.profiles import candidate, layer, model

NUM_MICRO_BATCHES = 2


def timed(forward: float, recomputed: float, backward: float, *saved: float) -> LayerProfile:
    candidates = (candidate(key=f"op#{number}", seconds=seconds) for number, seconds in enumerate(saved))
    return replace(
        layer(*candidates), forward_seconds=forward, recomputed_seconds=recomputed, backward_seconds=backward
    )


TRUE = replace(
    model(timed(4.0, 3.0, 8.0, 1.5, 0.5), timed(2.0, 1.0, 4.0), layers=(0, 1, 0, 0)),
    source="recorded",
    embedding_seconds=0.5,
    head_seconds=6.0,
)
SWAPPED = {1: frozenset({"op#0"}), 3: frozenset({"op#0", "op#1"})}


def slower(profile: ModelProfile, times: float) -> ModelProfile:
    profiles = tuple(
        replace(
            each,
            forward_seconds=times * (each.forward_seconds or 0.0),
            recomputed_seconds=times * (each.recomputed_seconds or 0.0),
            backward_seconds=times * (each.backward_seconds or 0.0),
            candidates=tuple(replace(item, seconds=times * (item.seconds or 0.0)) for item in each.candidates),
        )
        for each in profile.profiles
    )
    outside = {"embedding_seconds": times * 0.5, "head_seconds": times * 6.0}
    return replace(profile, profiles=profiles, **outside)


def seen(times: float) -> SeenStep:
    """A step of the true model on a processor that is so many times slower, under the plan that swaps `SWAPPED`."""
    number = times * NUM_MICRO_BATCHES
    saved = {1: 1.5, 3: 2.0}
    blocks = {0: BlockSeconds(forward=0.2 * number, backward=0.3 * number)}
    blocks |= {
        block: BlockSeconds(forward=4.0 * number, backward=(11.0 - saved.get(block, 0.0)) * number)
        for block in (1, 3, 4)
    }
    blocks[2] = BlockSeconds(forward=2.0 * number, backward=5.0 * number)
    blocks[5] = BlockSeconds(forward=0.0, backward=6.0 * number)
    return SeenStep(seconds=70.0 * number, blocks=blocks, nvme_seconds=1.0, up_seconds=1.0, down_seconds=1.0)


@pytest.mark.parametrize(
    ("recorded", "steps", "wanted"),
    [(1.0, [1.0], 1.0), (3.0, [1.0, 1.0, 1.0], 1.0), (1.5, [1.0, 1.1, 1.2], 1.15), (1.0, [9.0, 1.0], 1.0)],
)
def test_each_time_is_the_median_of_the_first_steps(recorded: float, steps: Sequence[float], wanted: float) -> None:
    found = refined_profile(
        slower(TRUE, recorded),
        [seen(times) for times in steps],
        swapped=SWAPPED,
        num_micro_batches=NUM_MICRO_BATCHES,
    )
    for mine, true in zip(found.profiles, slower(TRUE, wanted).profiles, strict=True):
        assert mine.forward_seconds == pytest.approx(true.forward_seconds)
        assert mine.recomputed_seconds == pytest.approx(true.recomputed_seconds)
        assert mine.backward_seconds == pytest.approx(true.backward_seconds, rel=0.03)
        assert [each.seconds for each in mine.candidates] == pytest.approx([each.seconds for each in true.candidates])
    assert found.embedding_seconds == pytest.approx(0.5 * wanted)
    assert found.head_seconds == pytest.approx(6.0 * wanted)


def test_what_is_counted_stays_as_it_was_recorded() -> None:
    found = refined_profile(TRUE, [seen(2.0)] * 3, swapped=SWAPPED, num_micro_batches=NUM_MICRO_BATCHES)
    assert slower(found, 0.0) == slower(TRUE, 0.0)


def stage(*, nvme: float = 0.0, up: float = 0.0, down: float = 0.0) -> StageTime:
    return StageTime(compute=0.0, up=up, down=down, nvme_read=nvme / 2, nvme_write=nvme / 2, total=0.0)


PREDICTED = StepTime(forward=stage(nvme=4.0, up=1.0, down=2.0), backward=stage(nvme=6.0, up=2.0, down=2.0))


def rates(hardware: HardwareProfile) -> list[float]:
    nvme = hardware.nvme
    return [nvme.read_bytes_per_second, nvme.write_bytes_per_second, nvme.mixed_bytes_per_second]


@pytest.mark.parametrize(
    ("seconds", "nvme_seconds", "computing", "times"),
    [
        (20.0, 5.0, 18.0, 2.0),
        (20.0, 10.0, 18.0, 1.0),
        (20.0, 16.0, 18.0, 1.0),  # computing bound the step: drives may have been waiting
        (20.0, 19.0, 19.5, 10 / 19),
        (20.0, 16.0, 15.0, 10 / 16),  # they were the busiest
        (40.0, 16.0, 15.0, 1.0),  # but nothing was busy
        (20.0, 0.5, 18.0, 4.0),  # no more at once
        (200.0, 8.0, 1.0, 1.0),  # it hardly matters
        (20.0, 0.0, 18.0, 1.0),
    ],
)
def test_drives_are_as_fast_as_they_were_seen(
    seconds: float, nvme_seconds: float, computing: float, times: float
) -> None:
    blocks = {
        0: BlockSeconds(forward=computing / 2, backward=0.0),
        1: BlockSeconds(forward=0.0, backward=computing / 2),
    }
    step = SeenStep(seconds=seconds, blocks=blocks, nvme_seconds=nvme_seconds, up_seconds=0.0, down_seconds=0.0)
    found = refined_hardware(WITHOUT_GPU, PREDICTED, [step, replace(step, nvme_seconds=10 * nvme_seconds), step])
    assert rates(found) == pytest.approx([times * rate for rate in rates(WITHOUT_GPU)])
    assert found.link is None


def test_drives_are_not_blamed_for_a_link_that_is_busier() -> None:
    step = SeenStep(seconds=20.0, blocks={}, nvme_seconds=15.0, up_seconds=16.0, down_seconds=0.0)
    assert rates(refined_hardware(WITH_GPU, PREDICTED, [step])) == rates(WITH_GPU)
    step = replace(step, up_seconds=14.0)
    assert rates(refined_hardware(WITH_GPU, PREDICTED, [step])) < rates(WITH_GPU)


def test_the_link_is_as_fast_as_it_was_seen() -> None:
    step = SeenStep(seconds=10.0, blocks={}, nvme_seconds=0.0, up_seconds=1.5, down_seconds=8.0)
    found, before = refined_hardware(WITH_GPU, PREDICTED, [step]).link, WITH_GPU.link
    assert found is not None and before is not None
    assert found.to_gpu_bytes_per_second == pytest.approx(2.0 * before.to_gpu_bytes_per_second)
    assert found.from_gpu_bytes_per_second == pytest.approx(0.5 * before.from_gpu_bytes_per_second)
    assert found.both_bytes_per_second == pytest.approx(0.5 * before.both_bytes_per_second)
