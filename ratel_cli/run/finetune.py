"""One run of `ratel finetune`, from a checked config to the export. All parts meet here.

    1. the inputs: model skeleton, tokenizer, data; and the store and its snapshot, opened if they exist
    2. the machine is measured and the plan made; the opening statement is printed      (--dry-run ends here)
    3. the store is resumed where a run left it, or created and filled; and so is its snapshot
    4. training, step by step; every step is committed
    5. the export: a Hugging Face directory

Invariant: nothing is written to a store before it is known that everything fits.
"""

from __future__ import annotations

from contextlib import ExitStack

from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.gpu import set_determinism
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.export_weights import export_model
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.plan import Plan
from ratel_cli.report.run import opening
from ratel_cli.run.base_model import hub_id, prepare_process
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.inputs import Inputs, identity_of, read_inputs
from ratel_cli.run.planner import estimated_profile, make_planner
from ratel_cli.run.profile_machine import measure_for_run
from ratel_cli.run.run_directory import CachedProfile, write_run_files
from ratel_cli.run.settings import place_of, snapshot_space, taken_bytes
from ratel_cli.run.snapshots import check_space, find_snapshot, make_snapshot, snapshot_rows, start_snapshots
from ratel_cli.run.store import find_store, make_store, resume_store
from ratel_cli.run.train import Training
from ratel_cli.store.store import Store
from ratel_cli.units import format_bytes


def run_finetune(config: RunConfig, log: RunLog, *, resume: str, dry_run: bool) -> None:
    """Run from start to end. `resume` is `auto`, `no`, or the number of a saved step. Raises RatelError."""
    prepare_process()
    with ExitStack() as resources:
        inputs = read_inputs(config, resources, log)  # phase 1
        set_determinism(config.deterministic, inputs.device)
        context = resources.enter_context(open_context(config, log, device=inputs.device))
        identity = identity_of(config, inputs)
        store = find_store(context, identity, resume=resume)
        snapshot = find_snapshot(context, identity, has_store=store is not None, resume=resume)

        hardware = measure_for_run(context, has_store=store is not None)  # phase 2
        planner = make_planner(context, inputs.model.spec, hardware)
        cache = CachedProfile(config, planner.spec, hardware)
        profile = cache.read() or estimated_profile(planner, inputs.model)
        plan = planner.plan(profile)
        space = snapshot_space(config, planner.spec, nvme_bytes=plan.nvme_bytes)
        rows = _opening_rows(context, inputs, plan, hardware, store, resume=resume)
        log.facts([*rows, *snapshot_rows(config, space, hardware)])
        if store is None:
            _check_space(config, plan, hardware)
        check_space(space)
        if dry_run:
            return

        context.listen()  # phase 3
        context.stop.must_resume = resume != "auto"
        target = snapshot or make_snapshot(context, planner.spec, identity, resume=resume)
        if store is None:
            store = make_store(context, inputs, identity, weights=hardware.nvme.weights, resume=resume)
        else:
            resume_store(context, store, resume=resume)

        def save_plan(plan: Plan, profile: ModelProfile) -> None:
            contents = {
                "hardware.json": hardware.to_json(),
                "model.json": cache.content(planner.spec, profile),
                "plan.json": plan.to_json(),
            }
            write_run_files(config, contents, log=log)

        save_plan(plan, profile)  # phase 4
        snapshots = start_snapshots(context, store, target, hardware, is_new=snapshot is None)
        with Training(context, inputs, planner, store, snapshots=snapshots, save_plan=save_plan) as training:
            training.run(plan, profile)
        context.stop.check()
        _export(context, inputs, store)  # phase 5


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
    log.say(f"exported the model to {config.output_dir}; load it with transformers' from_pretrained")
    log.say(f"the training state remains in {place_of(config)}; delete it when you no longer need it")


def _opening_rows(
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
    """Raise EnvironmentFailure unless store and scratch files fit together.

    Each directory is checked again when its file is made.
    """
    available_bytes = hardware.nvme.free_bytes + taken_bytes(config)
    if plan.nvme_bytes > available_bytes:
        raise EnvironmentFailure(
            f"not enough space for the store: it needs {format_bytes(plan.nvme_bytes)} in {place_of(config)}, "
            f"{format_bytes(available_bytes)} available",
            "free some space, set storage.paths to other directories, or halve the need with storage.durability: none",
        )
