"""`ratel export RUN -o DIR`: writes a Hugging Face directory from a saved step. `ratel merge RUN -o DIR`: with the base
model that its adapter is added to.

Invariant: nothing heavy is imported before the run's config is known to be right.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ratel_cli.commands import command
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput, Diverged, EnvironmentFailure, IntegrityFailure
from ratel_cli.run.files.output import check_export_output, finish_export
from ratel_cli.run.files.run_directory import find_run
from ratel_cli.sizes import MergeBase
from ratel_cli.units import counted


def run(path: Path, step: int | None, output: Path, *, overwrite: bool, merge_base: MergeBase | None = None) -> None:
    """Export the saved step `step`, or the result. `merge_base`: this base with the adapter. Raises RatelError."""
    merges = merge_base is not None
    log = RunLog()
    config = find_run(path, log)
    if merges and config.adapter is None:
        raise BadInput(
            f"{path}: this run trains no adapter", f"{command('export', path, '-o', output)} writes its model"
        )
    if merges and os.path.realpath(output) == os.path.realpath(config.output_dir):
        raise BadInput(f"-o: {output} contains the adapter", "choose another directory")
    check_export_output(config, output, step=step, overwrite=overwrite)
    finish_export(output, log, option="-o")
    from ratel_cli.run.ask.evaluate import evaluate_merged
    from ratel_cli.run.context import open_context
    from ratel_cli.run.inputs.base import load_with
    from ratel_cli.run.train.open import open_run, write_export, write_merged

    write: Callable[..., int] = write_export if merge_base is None else partial(write_merged, into=merge_base)
    with open_context(config, log) as context:
        context.listen()
        opened = open_run(context)
        exported = write(opened, opened.generation(step), output, overwrite=overwrite)
    how = load_with("transformers") if merges else opened.base.how_to_load
    log.say(f"{'merged' if merges else 'exported'} step {exported} to {output}; {how}")
    if not merges or not (config.load_in_4bit or config.load_in_8bit):
        return
    try:
        found = evaluate_merged(config, exported, log)
        log.say(f"loss on {counted(found[0].num_samples, 'sample')} of {found[0].data}, in {config.dtype}:")
        log.facts([(each.model, f"{each.loss:.4f}") for each in found])
    except (BadInput, EnvironmentFailure, IntegrityFailure, Diverged) as error:
        log.notice(f"the merged models were not compared: {error.message}")
