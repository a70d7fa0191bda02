"""One run: opens everything it needs, in order, trains, exports.

Called by `cli.finetune` with a checked config. The one place where all parts meet; below it,
functions take plain values.

    1. config, model skeleton, tokenizer, data
    2. measure the machine, make the plan, print the opening statement      (run_plan; --dry-run ends here)
    3. the store: opened where a run left it, or created and imported       (run_store); its snapshot (run_snapshots)
    4. train step by step, each one committed                               (run_steps)
    5. export the Hugging Face directory

Nothing is written to the store before phase 3 has checked that everything fits.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from ratel_cli.config.load import to_yaml
from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.gpu import set_determinism
from ratel_cli.hardware.host import return_freed_memory
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.export_weights import export_model
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.plan import Plan
from ratel_cli.report.run import opening
from ratel_cli.run.base_model import hub_id, silence_transformers
from ratel_cli.run.cached_profile import CachedProfile
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.inputs import Inputs, identity_of, read_inputs
from ratel_cli.run.plan import estimated_profile, make_planner, measure_hardware
from ratel_cli.run.settings import taken_bytes
from ratel_cli.run.snapshot_space import snapshot_space
from ratel_cli.run.snapshots import check_space, find_snapshot, make_snapshot, snapshot_rows, start_snapshots
from ratel_cli.run.store import find_store, make_store, resume_store
from ratel_cli.run.train import Training
from ratel_cli.store.store import Store
from ratel_cli.units import format_bytes


def run_finetune(config: RunConfig, log: RunLog, *, resume: str, dry_run: bool) -> None:
    """One run from start to end. Raises RatelError."""
    return_freed_memory()
    silence_transformers()
    with ExitStack() as resources:
        inputs = read_inputs(config, resources, log)
        set_determinism(config.deterministic, inputs.device)
        context = resources.enter_context(open_context(config, log, device=inputs.device))
        store = find_store(context, inputs, resume=resume)
        if store is not None:
            context.resources.enter_context(store)
        identity = identity_of(config, inputs)
        snapshot = find_snapshot(context, identity, has_store=store is not None, resume=resume)
        hardware = measure_hardware(context, has_store=store is not None)
        planner = make_planner(context, inputs.model.spec, hardware)
        kept = CachedProfile(config, planner.spec, hardware)
        profile = kept.read() or estimated_profile(planner, inputs.model)
        plan = planner.plan(profile)
        space = snapshot_space(config, planner.spec, nvme_bytes=plan.nvme_bytes)
        rows = _opening(context, inputs, plan, hardware, store, resume=resume)
        log.facts([*rows, *snapshot_rows(config, space, hardware)])
        if store is None:
            _check_space(config, plan, hardware)
        check_space(space)
        if dry_run:
            return
        context.listen()
        context.stop.must_resume = resume != "auto"
        target = snapshot or make_snapshot(context, planner.spec, identity, resume=resume)
        if store is None:
            made = make_store(context, inputs, drive_weights=hardware.nvme.weights, resume=resume)
            store = context.resources.enter_context(made)
        else:
            resume_store(context, store, resume=resume)

        def planned(plan: Plan, profile: ModelProfile) -> None:
            _write_run_files(config, kept.content(inputs.model.spec, profile), hardware, plan, log)

        planned(plan, profile)
        snapshots = start_snapshots(context, store, target, hardware, is_new=snapshot is None)
        with Training(context, inputs, planner, store, snapshots=snapshots, planned=planned) as training:
            training.run(plan, profile)
        context.stop.check()
        _export(context, inputs, store)


def _export(context: RunContext, inputs: Inputs, store: Store) -> None:
    config, log = context.config, context.log
    export_model(
        inputs.model.spec,
        store.current(),
        context.pool,
        base_dir=inputs.base_dir,
        output_dir=config.output_dir,
        dtype=config.dtype,
        buffers=inputs.buffers,
        base_model=hub_id(config),
        progress=context.stop.check,
    )
    log.say(f"saved {config.output_dir}; load it with transformers' from_pretrained")
    log.say(
        f"the training state stays in {', '.join(map(str, config.storage.paths))}; "
        "delete it when it is no longer needed"
    )


def _opening(
    context: RunContext, inputs: Inputs, plan: Plan, hardware: HardwareProfile, store: Store | None, *, resume: str
) -> list[tuple[str, str]]:
    config = context.config
    first_step = 0 if store is None else store.progress.step if resume == "auto" else int(resume)
    return opening(
        inputs.model.spec,
        plan,
        hardware,
        dtype=config.dtype,
        samples=inputs.data.num_samples,
        data_tokens=inputs.data.num_tokens,
        num_steps=inputs.num_steps,
        first_step=first_step,
        engine=context.queue.engine,
        paths=config.storage.paths,
        output_dir=config.output_dir,
        taken_bytes=taken_bytes(config),
    )


def _check_space(config: RunConfig, plan: Plan, hardware: HardwareProfile) -> None:
    """The store and the scratch file must fit together. Each directory is checked again when it is filled."""
    have_bytes = hardware.nvme.free_bytes + taken_bytes(config)
    if plan.nvme_bytes > have_bytes:
        raise EnvironmentFailure(
            f"no space for the store: need {format_bytes(plan.nvme_bytes)} in "
            f"{', '.join(map(str, config.storage.paths))}, have {format_bytes(have_bytes)}",
            "free some space, name other directories in storage.paths, or set storage.durability: none for half of it",
        )


def _write_run_files(
    config: RunConfig, model: dict[str, object], hardware: HardwareProfile, plan: Plan, log: RunLog
) -> None:
    run_dir = _run_dir(config)
    values = {"hardware.json": hardware.to_json(), "model.json": model, "plan.json": plan.to_json()}
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        for name, value in values.items():
            (run_dir / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        log.warn(f"{run_dir}: cannot be written ({error.strerror}); training goes on without it")


def _run_dir(config: RunConfig) -> Path:
    return config.output_dir / "run"
