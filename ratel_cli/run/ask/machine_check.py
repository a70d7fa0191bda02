"""What this machine lacks for a run: each thing on its own, so that `ratel check` reports all of them at once.

Invariant: nothing is written but temporary files, which are removed.
"""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import torch

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import ErrorList
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.cut.cut_model import AnyModel
from ratel_cli.planning.search.plan import Plan
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.files.output import has_own_store
from ratel_cli.run.inputs.settings import new_geometry
from ratel_cli.run.train.planner import estimated_profile, make_planner
from ratel_cli.run.train.profile_machine import measure_for_run
from ratel_cli.run.train.space import check_store_space, spaces_of


def check_machine(
    config: RunConfig,
    model: AnyModel,
    device: torch.device,
    errors: ErrorList,
    *,
    export_bytes: int,
    with_memory: bool,
) -> None:
    """Check the space of store, snapshot and export and, `with_memory`, the memory of a step.

    What is lacking goes to `errors`.
    """
    with open_context(config, RunLog(StringIO()), device=device) as context:
        has_store = has_own_store(config)
        hardware = errors.attempt(("storage",), lambda: measure_for_run(context, has_store=has_store))
        if hardware is None:
            return
        plan = None
        if with_memory:
            plan = errors.attempt(("limits", "host_memory"), lambda: _plan(context, model, hardware))
        shares = hardware.nvme.shares
        geometry = new_geometry(config, model.spec.stored_blocks, shares=shares)
        need_bytes = sum(geometry.file_bytes()) if plan is None else plan.nvme_bytes
        if not has_store:
            errors.attempt(("storage", "paths"), lambda: check_store_space(config, model.spec, need_bytes, hardware))
        spaces = spaces_of(config, model.spec, nvme_bytes=need_bytes, export_bytes=export_bytes, shares=shares)
        for space in spaces:
            errors.attempt(space.key, space.check)


def _plan(context: RunContext, model: AnyModel, hardware: HardwareProfile) -> Plan:
    """A plan that fits, whatever split and chunks the config leaves to it. Raises DoesNotFit."""
    config = context.config
    if config.split is None:
        context = replace(context, config=config.split_by(1))
    planner = make_planner(context, model.spec, hardware)
    return planner.plan(estimated_profile(planner, model))
