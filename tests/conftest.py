"""For all tests: signals reach whoever is started, even where the tests run in a shell's background."""

from __future__ import annotations

import signal

# Such a shell has its children ignore SIGINT, and those pass that on to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
