"""How torch's idle threads wait: asleep soon, or spinning. Its OpenMP reads that from the environment, once.

A thread of libgomp that has nothing to do spins for 300,000 rounds before it sleeps, and takes a core meanwhile from
those that compute. With 2,000 rounds a step of the demo took 1.05 s instead of 1.19 s on two quiet cores. With a load
of 20 beside it, a step took 92 s, and 18 s when idle threads slept at once (2-core EPYC, 2026-11).

Invariant: what the user has set stays as it is.
"""

from __future__ import annotations

import os
import sys
from typing import Final

SPIN_ROUNDS: Final = "GOMP_SPINCOUNT"
"""How long to spin; it has precedence over the policy."""
WAIT_POLICY: Final = "OMP_WAIT_POLICY"
"""`passive` is to sleep at once, `active` to spin for minutes."""
_FEW_ROUNDS: Final = "2000"


def let_idle_threads_sleep() -> None:
    """Let torch's idle threads sleep soon, in this process and those that it starts, unless the user has set how they
    wait. Where torch is loaded already it is too late for that."""
    if "torch" not in sys.modules and os.environ.keys().isdisjoint({SPIN_ROUNDS, WAIT_POLICY}):
        os.environ[SPIN_ROUNDS] = _FEW_ROUNDS
