"""One run of `ratel finetune`, from a checked config to the export. All parts meet here.

    1. the inputs: model skeleton, tokenizer, data; and the store and its snapshot, opened if they exist
    2. the machine is measured and the plan made, which splits the steps of a new run and chooses the chunks of its head
       if the config leaves that to it; one layer of each kind is run on the device that computes, and planned with; the
       opening statement is printed                                                    (--dry-run ends here)
    3. the store is resumed where a run left it, or created and filled; and so is its snapshot
    4. training, step by step; every step is committed
    5. the export: a Hugging Face directory, uploaded to the hub if the config names a repository

Invariants: nothing is written to a store before it is known that everything fits, and a folder of the user's becomes
the run's only when nothing can refuse the command any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ratel_cli.commands import command
from ratel_cli.config.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import EnvironmentFailure, ErrorList
from ratel_cli.hardware.gpu import determinism
from ratel_cli.hardware.load import LoadMeter
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.model.export_weights import export_bytes, export_model
from ratel_cli.model.spec import ModelSpec
from ratel_cli.planning.model_profile import ModelProfile
from ratel_cli.planning.plan import Plan
from ratel_cli.report.run import opening
from ratel_cli.run.base_model import prepare_process
from ratel_cli.run.branch import Branch, open_branch
from ratel_cli.run.card import card_of
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.hub import upload_export
from ratel_cli.run.inputs import Inputs, facts_of, identity_of, read_inputs
from ratel_cli.run.length import check_length
from ratel_cli.run.origin import Origin, check_same_origin, read_origin
from ratel_cli.run.output import claim_output, own_output, reject_lost_store
from ratel_cli.run.planner import Planner, estimated_profile, make_planner
from ratel_cli.run.profile_machine import measure_for_run, report_other_load
from ratel_cli.run.run_directory import HARDWARE_NAME, MODEL_NAME, PLAN_NAME, CachedProfile
from ratel_cli.run.run_files import files_of_training, forget_missing, write_run_files
from ratel_cli.run.settings import place_of, wear_limit
from ratel_cli.run.snapshots import find_snapshot, make_snapshot, space_rows, start_snapshots
from ratel_cli.run.space import Space, check_store_space, spaces_of, taken_bytes
from ratel_cli.run.split import plan_split, report_better_split, shaped_by_plan
from ratel_cli.run.store import as_stored, check_decay, find_store, make_store, resume_store
from ratel_cli.run.tokenizer import tokenizer_files
from ratel_cli.run.trackers import Trackers
from ratel_cli.run.train import Training
from ratel_cli.run.trial import tried_profile
from ratel_cli.store.store import Store
from ratel_cli.training.facts import FACTS_NAME, RunFacts


def run_finetune(
    config: RunConfig,
    log: RunLog,
    *,
    resume: str,
    dry_run: bool,
    overwrite: bool = False,
    origin: Origin | None = None,
    overwrite_store: bool = False,
) -> None:
    """Run from start to end. `resume` is `auto`, `no`, or the number of a saved step. Raises RatelError.

    `overwrite`: files of others in the output directory are replaced if they have the names of the model's files.
    `origin`: the run whose state a new run starts from, instead of the base model's weights.
    `overwrite_store`: with `resume` `no`, a store that another run made is replaced too.
    """
    prepare_process()
    with ExitStack() as resources:
        is_split_planned = config.is_split_planned
        config = as_stored(config, resume=resume, overwrite_store=overwrite_store)
        inputs = read_inputs(config, resources, log, dry_run=dry_run, overwrite=overwrite)  # phase 1
        resources.enter_context(determinism(config.deterministic, inputs.device, notice=log.notice))
        context = resources.enter_context(open_context(config, log, device=inputs.device))
        identity = identity_of(config, inputs)
        store = find_store(context, identity, resume=resume, overwrite_store=overwrite_store)
        branch = _branch(context, inputs, store, origin)
        first_step = branch.progress.step if branch else _first_step(context, inputs, store, resume=resume)
        snapshot = find_snapshot(
            context, identity, has_store=store is not None, resume=resume, overwrite_store=overwrite_store
        )
        if store is None and resume == "auto":
            reject_lost_store(config)

        meter, hardware = LoadMeter(), measure_for_run(context, has_store=store is not None)  # phase 2
        if config.is_split_planned or config.is_chunk_planned:
            context, inputs = shaped_by_plan(context, inputs, hardware)
            config = context.config
            identity = identity_of(config, inputs)
        planner = make_planner(context, inputs.model.spec, hardware)
        cache = CachedProfile(config, planner.spec, hardware)
        make_plan = partial(plan_split, planner, is_new=store is None) if is_split_planned else planner.plan
        profile, plan = _planned(context, inputs, planner, cache.read(), make_plan, meter)
        spaces = _spaces(context, inputs, plan, hardware)
        rows = _opening_rows(context, inputs, plan, hardware, first_step=first_step, is_split_planned=is_split_planned)
        log.facts([*rows, *space_rows(config, spaces, hardware)])
        if is_split_planned and store is not None:
            report_better_split(planner, profile, plan, log)
        check_wear = partial(_check_wear_limit, context, inputs, store, hardware, branch=branch, first_step=first_step)
        _check_limits(config, plan, hardware, check_wear=check_wear, has_store=store is not None, spaces=spaces)
        if dry_run:
            return

        claim_output(config)  # phase 3; from here on nothing is refused
        context.listen()
        context.stop.must_resume = resume != "auto"
        target = snapshot or make_snapshot(context, planner.spec, identity, resume=resume)
        facts = _announce(context, facts_of(inputs, identity, first_step=first_step), is_new=store is None)
        if store is None:
            store = make_store(context, inputs, identity, weights=hardware.nvme.weights, resume=resume, branch=branch)
        else:
            resume_store(context, store, resume=resume)

        save_plan = partial(
            _save_plan,
            context,
            planner.spec,
            hardware=hardware,
            cache=cache,
            facts=facts,
            is_split_planned=is_split_planned,
        )
        save_plan(plan, profile)  # phase 4
        snapshots = start_snapshots(context, store, target, hardware, is_new=snapshot is None)
        trackers = _open_trackers(context, store, resources)
        with Training(
            context, inputs, planner, store, snapshots=snapshots, trackers=trackers, save_plan=save_plan
        ) as training:
            training.run(plan, profile)
        _export(context, inputs, store, overwrite=overwrite)  # phase 5
    if config.hub_model_id is not None:
        upload_export(config, log)


def _export(context: RunContext, inputs: Inputs, store: Store, *, overwrite: bool) -> None:
    config, log = context.config, context.log
    context.stop.check()
    notices = export_model(
        inputs.model.spec,
        store.current(),
        context.pool,
        base_dir=inputs.base_dir,
        output_dir=config.output_dir,
        run=own_output(config),
        overwrite=overwrite,
        dtype=config.dtype,
        layout=inputs.layout,
        card=card_of(config, store, step=store.progress.step, log=log),
        replaced_sidecars=tokenizer_files(config, inputs.base_dir),
        progress=context.stop.check,
    )
    for text in notices:
        log.notice(text)
    log.remark(f"exported the model to {config.output_dir}; load it with transformers' from_pretrained")
    delete = command("clean", config.output_dir, "--store")
    log.remark(f"the training state remains in {place_of(config)}; {delete} deletes it")


def _planned(
    context: RunContext,
    inputs: Inputs,
    planner: Planner,
    cached: ModelProfile | None,
    make_plan: Callable[[ModelProfile], Plan],
    meter: LoadMeter,
) -> tuple[ModelProfile, Plan]:
    """The profile and the plan of the first step. A model that no run has recorded is tried and measured. `meter`: of
    other work since measuring began, which is reported."""
    profile = cached or estimated_profile(planner, inputs.model)
    plan = make_plan(profile)
    if cached is None:
        measured = tried_profile(context, inputs, planner, plan, profile)
        if measured is not None:
            profile, plan = measured, make_plan(measured)
    report_other_load(meter, context.log)
    return profile, plan


def _announce(context: RunContext, facts: RunFacts, *, is_new: bool) -> RunFacts:
    """The facts. Those of a new run are written before its import, which may take long, so that `status` shows it."""
    if is_new:
        write_run_files(context.config, {FACTS_NAME: facts.to_json()}, log=context.log)
    return facts


def _open_trackers(context: RunContext, store: Store, resources: ExitStack) -> Trackers:
    """The trackers. Their files, and the others that grow while the run trains, are the run's from now on."""
    config, names = context.config, files_of_training(context.config)
    claim_output(config, names)
    resources.callback(forget_missing, config.output_dir, names)
    return resources.enter_context(
        Trackers(
            config,
            context.log,
            committed_step=store.progress.step,
            is_stopping=lambda: context.stop.is_requested,
        )
    )


def _save_plan(
    context: RunContext,
    spec: ModelSpec,
    plan: Plan,
    profile: ModelProfile,
    *,
    hardware: HardwareProfile,
    cache: CachedProfile,
    facts: RunFacts,
    is_split_planned: bool,
) -> None:
    """Write the files in `run/` that the plan, and the profile that it was made from, belong to."""
    contents = {
        FACTS_NAME: facts.to_json(),
        HARDWARE_NAME: hardware.to_json(),
        MODEL_NAME: cache.content(spec, profile),
        PLAN_NAME: {**plan.to_json(), "is_split_planned": is_split_planned},
    }
    write_run_files(context.config, contents, log=context.log)


def _branch(context: RunContext, inputs: Inputs, store: Store | None, origin: Origin | None) -> Branch | None:
    """The step of another run that a new run starts from; None if the run begins with its base model, or resumes."""
    if origin is None:
        return None
    if store is not None:
        check_same_origin(context.config, origin)
        return None
    return open_branch(context, inputs, origin)


def _first_step(context: RunContext, inputs: Inputs, store: Store | None, *, resume: str) -> int:
    """The step that the run begins or resumes after. Reports another length than before. Raises BadInput."""
    if store is None:
        return 0
    check_decay(context.config, inputs.model.spec)
    step = store.progress.step if resume == "auto" else int(resume)
    notice = check_length(
        context.config,
        first_step=step,
        steps_per_epoch=inputs.data.steps_per_epoch,
        saved_steps=store.pinned_steps,
    )
    if notice is not None:
        context.log.notice(notice)
    return step


def _spaces(context: RunContext, inputs: Inputs, plan: Plan, hardware: HardwareProfile) -> tuple[Space, ...]:
    config, spec = context.config, inputs.model.spec
    return spaces_of(
        config,
        spec,
        nvme_bytes=plan.nvme_bytes,
        export_bytes=export_bytes(inputs.layout, inputs.base_dir),
        weights=hardware.nvme.weights,
    )


def _opening_rows(
    context: RunContext,
    inputs: Inputs,
    plan: Plan,
    hardware: HardwareProfile,
    *,
    first_step: int,
    is_split_planned: bool,
) -> list[tuple[str, str]]:
    config, data = context.config, inputs.data
    return opening(
        inputs.model.spec,
        plan,
        hardware,
        dtype=config.dtype,
        samples=data.num_samples,
        data_tokens=data.num_tokens,
        loss_share=data.loss_share,
        num_steps=inputs.num_steps,
        first_step=first_step,
        engine=context.queue.engine,
        paths=config.storage.paths,
        output_dir=config.output_dir,
        taken_bytes=taken_bytes(config),
        is_split_planned=is_split_planned,
        computed_tokens=None if data.is_packed else round(data.num_computed_tokens / data.steps_per_epoch),
        endurance_tb=config.storage.endurance_tb,
    )


def _check_wear_limit(
    context: RunContext,
    inputs: Inputs,
    store: Store | None,
    hardware: HardwareProfile,
    *,
    branch: Branch | None,
    first_step: int,
) -> None:
    """Warn if `storage.max_tb_written` will end the run, which goes on after `first_step`, too early.

    Raises EnvironmentFailure if it allows no step at all.
    """
    record = None if store is None else read_origin(context.config)
    limit = wear_limit(
        context.config,
        inputs.model.spec.stored_blocks,
        weights=hardware.nvme.weights,
        first_step=branch.progress.step if branch else record.first_step if record else 0,
    )
    if limit is None or first_step >= inputs.num_steps:
        return
    if store is not None:
        limit = replace(limit, store_bytes=store.made_bytes, slot_bytes=store.slot_bytes)
    warning = limit.warning(inputs.num_steps, done=first_step)
    if warning is not None and limit.last_step <= first_step:
        raise EnvironmentFailure(warning, "increase storage.max_tb_written")
    if warning is not None:
        context.log.warn(warning)


def _check_limits(
    config: RunConfig,
    plan: Plan,
    hardware: HardwareProfile,
    *,
    check_wear: Callable[[], None],
    has_store: bool,
    spaces: Sequence[Space],
) -> None:
    """Raise EnvironmentFailure unless wear, snapshot and export are within their limits, and, together, store and
    scratch files of a new run.

    Each directory is checked again when its file is made.
    """
    errors = ErrorList()
    errors.attempt(("storage", "max_tb_written"), check_wear)
    if not has_store:
        errors.attempt(("storage", "paths"), lambda: check_store_space(config, plan.nvme_bytes, hardware))
    for space in spaces:
        errors.attempt(space.key, space.check)
    errors.raise_all()
