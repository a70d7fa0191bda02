"""The AdamW benchmark runs, prints its table, and ends with JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ratel_cli import _native

SCRIPT = "scripts.bench.adamw"

OTHER_RULES = (
    "adamw_8bit", "lion", "sgd", "sgd_momentum", "muon", "adamw_stochastic", "adamw_8bit_stochastic",
)  # fmt: skip


@pytest.mark.nightly
def test_smoke() -> None:
    run = subprocess.run(
        [sys.executable, "-m", SCRIPT, "--smoke"], capture_output=True, text=True, timeout=600, check=True
    )
    lines = run.stdout.splitlines()
    report = json.loads(lines[-1])
    names = {result["name"] for result in report["results"]}
    isas = _native.supported_isas()
    peers = ["torch"] if find_spec("deepspeed") is None else ["torch", "deepspeed"]
    assert names == {f"{kind} {isa}" for kind in ("stream", "adamw") for isa in isas} | {
        f"{peer} {what}" for peer in peers for what in ("fused", "three passes")
    } | {f"{rule} {isas[-1]}" for rule in OTHER_RULES}
    assert {name.partition("_")[0] for name in report["speedup_over_three_passes"]} == set(peers)
    assert all(result["seconds"] > 0 for result in report["results"])
    assert ("deepspeed takes no part: it is not installed" in lines) == ("deepspeed" not in peers)
