"""The step benchmark runs, and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_step.py"


def run(*arguments: str) -> tuple[str, dict[str, dict[str, object]]]:
    command = [sys.executable, str(SCRIPT), "--shape", "tiny", "--tokens", "16", "--micro-batches", "2", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return output, json.loads(output.splitlines()[-1])


def test_both_contestants_and_exact_traffic(tmp_path: Path) -> None:
    output, summary = run("--rounds", "1", "--steps", "2", "--directory", str(tmp_path))
    assert "ratel / plain:" in output
    assert summary["time_ratio"] and summary["memory_ratio"]
    [measured] = summary["ratel"]["runs"]  # type: ignore[misc]
    assert measured["nvme_read_bytes"] == measured["predicted_read_bytes"]
    assert measured["nvme_written_bytes"] == measured["predicted_written_bytes"]
    [plain] = summary["plain"]["runs"]  # type: ignore[misc]
    assert len(plain["losses"]) == len(measured["losses"]) == 2
    assert abs(plain["losses"][0] - measured["losses"][0]) < 0.1
    assert list(tmp_path.iterdir()) == []
