"""`ratel finetune CONFIG --ranks N`: starts the command in N processes on this machine, by torchrun's agent.

Invariant: the exit code is that of the rank that ended first for a reason of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from ratel_cli.errors import BadInput

_THREADS = "OMP_NUM_THREADS"
_SHUTDOWN_SECONDS = 600
"""A rank that is asked to stop ends after the step that it computes."""


def launch(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `ratel ARGUMENTS` in so many ranks. Returns the exit code. Raises BadInput."""
    if num_ranks < 1:
        raise BadInput(f"argument '--ranks {num_ranks}': must be at least 1")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # the ranks say what went wrong
    num_cores = len(os.sched_getaffinity(0))
    os.environ.setdefault(_THREADS, str(max(1, num_cores // num_ranks)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"ratel-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGTERM",
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    # A terminal sends Ctrl-C to the ranks, too. They end after their step, and the agent with them.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        elastic_launch(config, sys.executable)("-m", "ratel_cli", *arguments)
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode
    finally:
        signal.signal(signal.SIGINT, before)
    return 0
