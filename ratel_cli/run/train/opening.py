"""What a run says before it begins, and the limits that it must keep to.

Invariant: nothing is written here. A run that passes is refused later only where a directory has changed meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ratel_cli.errors import EnvironmentFailure, ErrorList
from ratel_cli.io.files import device_of
from ratel_cli.model.files.directory import find_weight_files
from ratel_cli.planning.search.plan import Plan
from ratel_cli.report.words.plan import reference_row, split_words
from ratel_cli.report.words.run import StoreDrives, base_row, opening
from ratel_cli.run.files.origin import read_origin
from ratel_cli.run.inputs.settings import wear_limit
from ratel_cli.run.train.decided import DecidedRun
from ratel_cli.run.train.reference import check_reference
from ratel_cli.run.train.space import Space, check_store_space, taken_bytes
from ratel_cli.training.facts import RunFacts


def opening_rows(run: DecidedRun, plan: Plan, facts: RunFacts) -> list[tuple[str, str]]:
    """The rows of the opening statement, but for the space that the run takes."""
    config, data = run.context.config, run.inputs.data
    rows = opening(
        run.inputs.model.spec,
        plan,
        run.hardware,
        facts,
        StoreDrives(
            engine=run.context.queue.engine,
            paths=config.storage.paths,
            taken_bytes=taken_bytes(config.storage.paths),
            endurance_tb=config.storage.endurance_tb,
        ),
        dtype=config.dtype,
        loss_share=data.loss_share,
        split=split_words(plan.workload, is_planned=run.is_split_planned, num_ranks=run.context.ranks.size),
        output_dir=config.output_dir,
    )
    if config.base_storage == "in_place":
        directory = run.inputs.base.directory
        devices = {os.stat(path).st_dev for path in find_weight_files(directory).paths}  # links are followed
        is_elsewhere = not devices.issubset(map(device_of, config.storage.paths))
        rows.insert(-1, base_row(run.inputs.model.spec, directory, is_elsewhere=is_elsewhere))
    if config.has_reference and run.store is None:
        num_steps = min(run.inputs.num_steps, data.steps_per_epoch)
        rows.insert(-1, reference_row(num_steps, num_steps * plan.time.forward.total))
    return rows


def _check_wear_limit(run: DecidedRun) -> None:
    """Warn if `storage.max_tb_written` will end the run too early. Raises EnvironmentFailure if it allows no step at
    all."""
    config, first_step, num_steps = run.context.config, run.first_step, run.inputs.num_steps
    record = None if run.store is None else read_origin(config)
    limit = wear_limit(
        config,
        run.inputs.model.spec.sliced(run.context.ranks.slice).stored_blocks,
        shares=run.hardware.nvme.shares,
        first_step=run.branch.source.progress.step if run.branch else record.first_step if record else 0,
        num_sharing=run.context.layout.on_drives,
    )
    if limit is None or first_step >= num_steps:
        return
    if run.store is not None:
        limit = replace(limit, store_bytes=run.store.made_bytes, slot_bytes=run.store.slot_bytes)
    warning = limit.warning(num_steps, done=first_step)
    if warning is not None and limit.last_step <= first_step:
        raise EnvironmentFailure(warning, "increase storage.max_tb_written")
    if warning is not None:
        run.context.log.warn(warning)


def check_limits(run: DecidedRun, plan: Plan, spaces: Sequence[Space]) -> None:
    """Raise EnvironmentFailure unless wear, snapshot and export are within their limits, and, together, store and
    scratch files of a new run; and what the reference model raises.

    Each directory is checked again when its file is made.
    """
    config, spec, errors = run.context.config, run.inputs.model.spec, ErrorList()
    errors.attempt(("storage", "max_tb_written"), lambda: _check_wear_limit(run))
    if run.store is None:
        errors.attempt(
            ("storage", "paths"),
            lambda: check_store_space(config, spec, plan.nvme_bytes, run.hardware, layout=run.context.layout),
        )
    for space in spaces:
        errors.attempt(space.key, space.check)
    errors.attempt(
        ("rl",),
        lambda: check_reference(run.context, run.inputs, run.identity, store=run.store, origin=run.origin),
    )
    errors.raise_all()
