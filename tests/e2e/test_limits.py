"""Limits on host memory, from ample to just enough: peaks stay inside, and bits are the same. Less is rejected."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from ratel_cli.units import MIB
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import Config, ratel_command, save_base

MORE_MIB = (16, 48, 128, 256, 2048)
"""Memory beyond just enough. The process itself takes up to 9 MiB more or less each time."""


def run(config: Config, *arguments: str) -> tuple[int, str]:
    """Run it in a new process, whose peak memory is that of the run."""
    command = [str(ratel_command()), "finetune", str(config), *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=600, check=False)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def larger_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "larger", num_layers=6, hidden_size=256)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes",
    [{"max_grad_norm": 0}, {"max_grad_norm": 1.0}, {"max_grad_norm": 1.0, "val_set_size": 8, "eval_steps": 1}],
    ids=["unclipped", "clipped", "evaluated"],
)
def test_peaks_stay_inside_limits(make_config: MakeConfig, larger_base: Path, changes: dict[str, object]) -> None:
    def config_with(limit_bytes: int) -> Config:
        return make_config(
            f"{limit_bytes}",
            base=larger_base,
            dtype="bfloat16",
            micro_batch_size=16,
            max_steps=3,
            **changes,
            limits={"host_memory": limit_bytes},
        )

    refused = config_with(300 * MIB)
    code, stderr = run(refused)
    shortfall = re.search(r"error: RAM: .* available \(short by ([\d.]+) MiB\)", stderr)
    assert code == 3 and shortfall, stderr
    assert not refused.store.exists() and not (refused.output / "run" / "plan.json").exists()
    just_enough = 300 * MIB + int(float(shortfall[1]) * MIB)
    hashes, swapped = set(), []
    for more_mib in MORE_MIB:
        config = config_with(just_enough + more_mib * MIB)
        code, stderr = run(config)
        assert code == 0, stderr
        lines = config.metrics
        assert max(line["host_peak_bytes"] for line in lines) <= just_enough + more_mib * MIB
        hashes.add(config.export_hash)
        swapped.append(lines[-1]["swapped_bytes"])
    assert len(hashes) == 1
    # How much more depends on rates that each run measures.
    assert swapped[0] < max(swapped)


@pytest.mark.nightly
def test_the_budget_of_the_compute_device_is_a_limit(make_config: MakeConfig, larger_base: Path) -> None:
    config = make_config(base=larger_base, limits={"host_memory": "8GiB", "gpu_memory": "16MiB"})
    code, stderr = run(config)
    assert code == 3
    assert re.search(r"error: GPU memory: one block .* need .*, 16.0 MiB available \(short by .*\)", stderr)
    assert "limits.gpu_memory" in stderr
    assert not config.store.exists()
