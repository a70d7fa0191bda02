"""`ratel finetune CONFIG --ranks N`: starts the command in N processes on this machine, by torchrun's agent.

The agent passes on SIGINT and SIGTERM, and waits until the ranks have ended.

Invariant: the exit code is that of the rank that ended first for a reason of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from ratel_cli.engine.ranks.launched import is_launched
from ratel_cli.errors import SIGNALLED, BadInput, RankKilled, RankLost

_THREADS = "OMP_NUM_THREADS"
_SHUTDOWN_SECONDS = 3600
"""A rank that is asked to stop ends after the step that it computes."""
_OF_ANOTHER = (RankLost.exit_code, SIGNALLED + signal.SIGTERM, -signal.SIGTERM)
"""Exit codes of ranks that end because another one has: by themselves, or since the agent then stops all."""


def launch(num_ranks: int, arguments: Sequence[str]) -> int:
    """Run `ratel ARGUMENTS` in `num_ranks` processes. Returns the exit code. Raises BadInput, RankKilled."""
    if is_launched():
        raise BadInput("--ranks is not for a process that torchrun has started", "leave it out")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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
        signals_to_handle="SIGTERM,SIGINT",
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )

    def comes_first(failure: ProcessFailure) -> tuple[bool, int]:
        return failure.exitcode in _OF_ANOTHER, failure.timestamp

    logging.disable()  # the agent's: the ranks report what went wrong
    try:
        elastic_launch(config, sys.executable)("-m", "ratel_cli", *arguments)
    except ChildFailedError as ended:
        first = min(ended.failures.values(), key=comes_first)
        if first.exitcode < 0:
            raise RankKilled(first.local_rank, -first.exitcode) from ended
        return first.exitcode
    except SignalException as stopped:
        return SIGNALLED + int(stopped.sigval)
    finally:
        logging.disable(logging.NOTSET)
    return 0
