"""`ratel demo`: makes a small model and data for it, fine-tunes it with all state on disk, and asks it a question.

Invariants: nothing is downloaded. Without `--keep` nothing remains, however the command ends.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ratel_cli.cli import finetune, generate
from ratel_cli.commands import command
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, EnvironmentFailure, Interrupted
from ratel_cli.run.files.run_directory import METRICS_NAME, read_config, run_directory
from ratel_cli.run.train.start import Resume

QUESTION: Final = "What is lambda?"
_ANSWER_TOKENS: Final = 80


def run(keep: Path | None) -> None:
    """Train and ask, in a new directory `keep`, or in one that is removed in the end. Raises RatelError."""
    log = RunLog()
    with ExitStack() as resources:
        try:
            directory = (
                Path(resources.enter_context(TemporaryDirectory(prefix="ratel-demo-"))) if keep is None else keep
            )
            _check_empty(directory)
            config = _files(directory, log)
        except OSError as error:
            raise EnvironmentFailure(f"the demo's files cannot be written: {error.strerror or error}") from error
        try:
            _train_and_ask(config, log)
        except Interrupted as stopped:
            message = "Stopped. All of it is removed again."
            if keep is not None:
                message = f"Stopped. Run {command('finetune', config)} to continue."
            raise Interrupted(stopped.signal_number, message) from stopped
    if keep is None:
        log.say(f"all of it is removed again; {command('demo', '--keep', 'DIR')} keeps it")
    else:
        log.say(f"{keep} has all of it; try {command('report', config)} and {command('plan', config)}")


def _check_empty(directory: Path) -> None:
    """Raise BadInput unless `directory` is empty, or nothing yet."""
    if os.path.lexists(directory) and (not os.path.isdir(directory) or os.listdir(directory)):
        raise BadInput(f"argument '--keep {directory}': there is something already", "name a new directory")


def _files(directory: Path, log: RunLog) -> Path:
    """The config, after everything that it names is made."""
    log.say("making a small model and a dataset from Python's own help")
    from ratel_cli.run.start.demo import write_base, write_config

    write_base(directory)
    return write_config(directory)


def _train_and_ask(config: Path, log: RunLog) -> None:
    finetune.run(config, [], Resume(), dry_run=False, overwrite=False, origin=None, fresh_optimizer=False)
    from ratel_cli.training.history import read_history

    output_dir = read_config(config, log).output_dir
    steps = read_history(run_directory(output_dir) / METRICS_NAME).steps
    log.say(f"loss {steps[0].loss:.4f} in step {steps[0].step}, {steps[-1].loss:.4f} in step {steps[-1].step}")
    log.say(f"> {QUESTION}")
    generate.run(
        output_dir,
        [QUESTION],
        None,
        max_new_tokens=_ANSWER_TOKENS,
        temperature=0.0,
        raw=False,
        step=None,
        as_json=False,
    )
