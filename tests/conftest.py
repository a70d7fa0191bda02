"""For all tests: one thread for torch, signals that reach whoever is started, and Hypothesis's profiles."""

from __future__ import annotations

import os
import signal

from tests.tiers import register_profiles

# Models of tests are tiny: more threads only wait for each other, and the workers share the cores already.
# Set before anything imports torch, and passed on to every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell's background job has its children ignore SIGINT, and those pass that on to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

register_profiles()
