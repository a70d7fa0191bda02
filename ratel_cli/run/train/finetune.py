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

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ratel_cli.commands import command
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.engine.ranks.processes import open_ranks
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.engine.ranks.remote import read_by_first
from ratel_cli.errors import BadInput, EnvironmentFailure, ErrorList, NotEnoughSpace
from ratel_cli.hardware.gpu import determinism
from ratel_cli.hardware.load import LoadMeter
from ratel_cli.hardware.shares import share_of
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.io.files import device_of
from ratel_cli.model.export.export_weights import export_bytes
from ratel_cli.model.files.directory import find_weight_files
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.search.plan import Plan
from ratel_cli.report.words.plan import reference_row, split_words
from ratel_cli.report.words.run import base_row, opening
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.files.origin import Origin, OriginRecord, check_same_origin, read_origin
from ratel_cli.run.files.output import claim_output, reject_lost_store
from ratel_cli.run.files.run_directory import HARDWARE_NAME, MODEL_NAME, PLAN_NAME, CachedProfile, store_at
from ratel_cli.run.files.run_files import files_of_training, forget_missing, write_run_files
from ratel_cli.run.inputs.filling import note_filling
from ratel_cli.run.inputs.inputs import Inputs, facts_of, identity_of, read_inputs
from ratel_cli.run.inputs.length import check_length, num_steps, rounds_up
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.settings import wear_limit
from ratel_cli.run.train.branch import Branch, open_branch
from ratel_cli.run.train.card import card_of
from ratel_cli.run.train.hub import upload_export
from ratel_cli.run.train.open import slices_of
from ratel_cli.run.train.planner import Planner, estimated_profile, make_planner
from ratel_cli.run.train.profile_machine import measure_for_run, report_other_load
from ratel_cli.run.train.ranks import (
    RANK_TIMEOUT_SECONDS,
    Beginning,
    check_same,
    check_same_options,
    common_beginning,
    config_of_rank,
    first_rank_first,
    layout_of,
    measured_in_turn,
    measured_network,
    share_origin,
    with_shape_of_first,
)
from ratel_cli.run.train.reference import check_reference, with_reference
from ratel_cli.run.train.resharding import Resharding, finish_resharding
from ratel_cli.run.train.snapshots import find_snapshot, make_snapshot, space_rows, start_snapshots
from ratel_cli.run.train.space import Space, check_store_space, spaces_of, taken_bytes
from ratel_cli.run.train.split import plan_split, report_better_split, shaped_by_plan
from ratel_cli.run.train.start import GoBack, Resume, Start
from ratel_cli.run.train.store import as_resumed, check_decay, find_store, make_store, resume_store
from ratel_cli.run.train.trackers import Trackers
from ratel_cli.run.train.train import Training
from ratel_cli.run.train.trial import tried_profile
from ratel_cli.store.joined import Readable
from ratel_cli.store.open import START_OVER
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.training.facts import FACTS_NAME, RunFacts


def run_finetune(
    config: RunConfig,
    log: RunLog,
    *,
    start: Start,
    dry_run: bool,
    overwrite: bool = False,
    origin: Origin | None = None,
) -> None:
    """Run from start to end. Raises RatelError.

    `overwrite`: files of others in the output directory are replaced if they have the names of the model's files.
    `origin`: the run whose state a new run starts from, instead of the base model's weights.
    """
    prepare_process()
    with ExitStack() as resources:
        ranks = resources.enter_context(open_ranks(timeout_seconds=RANK_TIMEOUT_SECONDS))
        if ranks.size > 1:
            config = config_of_rank(config, ranks)
        check_same_options(ranks, start, dry_run, str(origin), origin is not None and origin.fresh_optimizer)
        with first_rank_first(ranks):
            if not ranks.rank and not dry_run:
                finish_resharding(config, log)
        record = read_origin(config)
        first_step = 0 if record is None else record.first_step
        begins = common_beginning(ranks, config.storage.paths, start, first_step=first_step)
        start = begins.start
        run = _find(config, log, resources, begins, origin, ranks, dry_run=dry_run, overwrite=overwrite)  # phases 1, 2
        context, inputs, planner, hardware = run.context, run.inputs, run.planner, run.hardware
        cache = CachedProfile(context.config, planner.spec, hardware)
        profile, plan = _planned(run, cache.read())
        spaces = spaces_of(
            context.config,
            inputs.model.spec,
            nvme_bytes=plan.nvme_bytes,
            own=inputs.model.spec.sliced(context.ranks.slice),
            layout=context.layout,
            export_bytes=export_bytes(inputs.layout, inputs.base.sidecars(context.config)),
            shares=hardware.nvme.shares,
        )
        log.facts([*_opening_rows(run, plan), *space_rows(context.config, spaces, hardware)])
        if run.written.split is None and run.store is not None:
            report_better_split(planner, profile, plan, log)
        _check_limits(run, plan, spaces)
        if dry_run:
            return

        with first_rank_first(ranks):
            claim_output(context.config)  # phase 3; from here on nothing is refused
        context.listen()
        context.stop.must_resume = start != Resume()
        target = run.snapshot or make_snapshot(context, planner.spec, inputs.source, run.identity, start)
        facts = _announce(run)
        if run.store is None:
            shares = hardware.nvme.shares
            store = make_store(context, inputs, run.identity, start, shares=shares, branch=run.branch)
        else:
            store = run.store
            resume_store(context, store, start, num_steps=inputs.num_steps)

        save_plan = partial(_save_plan, run, cache, facts)
        save_plan(plan, profile)  # phase 4
        inputs = with_reference(context, inputs, store, run.identity)
        snapshots = start_snapshots(context, store, target, hardware, is_new=run.snapshot is None)
        trackers = _open_trackers(context, store, resources)
        with Training(
            context, inputs, planner, store, snapshots=snapshots, trackers=trackers, save_plan=save_plan
        ) as training:
            training.run(plan, profile)
        [exported] = slices_of([store], training.best_saved.step)
        with read_by_first(ranks, planner.spec, exported, context.pool) as generation:
            if generation is not None:
                _export(context, inputs, store, generation, training, overwrite=overwrite)  # phase 5
        _save_end(run, training, facts)
    if context.config.hub_model_id is not None:
        upload_export(context.config, log)


_STEPS_LOOKED_AT = 16
"""Steps whose micro-batches are searched for one that has about as many tokens as those of an epoch have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run that is decided but for its plan. The config in its context has the split, and the chunks of the head."""

    context: RunContext
    inputs: Inputs
    identity: StoreIdentity
    store: Store | None
    """None for a new run."""
    snapshot: Store | None
    """None if there is none yet."""
    branch: Branch | None
    first_step: int
    """The run begins or resumes after this step."""
    written: RunConfig
    """The config as it was given. If it leaves the split to a plan, one splits the steps, now or when the run began."""
    hardware: HardwareProfile
    """Profile of the machine. That of the planner is this rank's share."""
    meter: LoadMeter
    """Measures other work on the machine since measuring began."""
    planner: Planner

    @property
    def origin(self) -> OriginRecord | None:
        """The step of another run that it starts from, or has started from."""
        if self.branch is not None:
            return self.branch.record
        return None if self.store is None else read_origin(self.context.config)


def _find(
    config: RunConfig,
    log: RunLog,
    resources: ExitStack,
    begins: Beginning,
    origin: Origin | None,
    ranks: Ranks,
    *,
    dry_run: bool,
    overwrite: bool,
) -> _Run:
    """Read the inputs, open the store and its snapshot, if they exist, and measure the machine; choose what the config
    leaves to the plan, once and for all steps."""
    written, start = config, begins.start
    change = Resharding.of(config, ranks, before=begins.ranks_before, dry_run=dry_run)
    config = with_shape_of_first(ranks, as_resumed(config if change is None else change.shaped(config), start), written)
    with first_rank_first(ranks):
        inputs = read_inputs(
            config, resources, log, num_ranks=ranks.size, dry_run=dry_run or ranks.rank > 0, overwrite=overwrite
        )
    resources.enter_context(determinism(config.deterministic, inputs.device, notice=log.notice))
    context = resources.enter_context(open_context(config, log, device=inputs.device, ranks=ranks))
    identity = identity_of(config, inputs)
    check_same(ranks, identity, config, start)
    meter = LoadMeter()
    hardware = measured_in_turn(ranks, partial(measure_for_run, context, has_store=begins.ranks_before > 0))  # phase 2
    context = replace(context, layout=layout_of(ranks, config.storage.paths))
    share = share_of(hardware, context.layout, network=measured_network(ranks))
    if change is not None:
        planner = make_planner(context, inputs.model.spec, share)
        planner.plan(estimated_profile(planner, inputs.model))  # fails before their stores are made if no step fits
        change.make(context, inputs.model.spec, inputs.source, identity)
    if begins.ranks_before and not dry_run:
        share_origin(ranks, config)
    [rounds_as_now], *_ = ranks.gathered([rounds_up(config)])
    store = find_store(context, identity, start)
    if store is not None and not rounds_as_now:
        counted = num_steps(config, inputs.data.steps_per_epoch, rounds_up=False)
        inputs = replace(inputs, num_steps=counted, rounds_up=False)
    if store is not None and store.rank_slice != ranks.slice:
        raise BadInput(f"{store_at(config)} holds the store of another rank, or of another number of them", START_OVER)
    branch = _branch(context, inputs, store, origin)
    first_step = branch.progress.step if branch else _first_step(context, inputs, store, start)
    snapshot = find_snapshot(context, identity, start, has_store=store is not None)
    if store is None and start == Resume():
        reject_lost_store(config)

    if config.split is None or config.is_chunk_planned:
        context, inputs = shaped_by_plan(context, inputs, share)
    if ranks.size > 1:
        config = with_shape_of_first(ranks, context.config, written)
        context = replace(context, config=config)
        inputs = replace(inputs, data=inputs.data.split_by(config.known_split[0]))
    identity = identity_of(context.config, inputs)
    filling = inputs.data.filling  # of two texts, it reads steps
    note_filling(context.config, filling)
    return _Run(
        context=context,
        inputs=inputs,
        identity=identity,
        store=store,
        snapshot=snapshot,
        branch=branch,
        first_step=first_step,
        written=written,
        hardware=hardware,
        meter=meter,
        planner=make_planner(context, inputs.model.spec, share, filling=filling),
    )


def _export(
    context: RunContext, inputs: Inputs, store: Store, generation: Readable, training: Training, *, overwrite: bool
) -> None:
    config, log = context.config, context.log
    context.stop.check()
    try:
        notices = inputs.base.export(
            config,
            generation,
            context.pool,
            config.output_dir,
            layout=inputs.layout,
            card=card_of(config, store, step=generation.progress.step, log=log),
            overwrite=overwrite,
            option="output_dir",
            progress=context.stop.check,
        )
    except NotEnoughSpace as failure:  # with another output_dir, training would begin again
        elsewhere = command("export", config.output_dir, "-o", "DIR")
        failure.hint = f"free space there and run the same command again, or write it elsewhere: {elsewhere}"
        raise
    for text in notices:
        log.notice(text)
    saved = training.best_saved.step
    which = "the best" if saved == training.best.step else "the best that is saved"
    what = "the model" if saved is None else f"the model of step {saved}, {which},"
    log.remark(f"exported {what} to {config.output_dir}; {inputs.base.how_to_load}")
    delete = command("clean", config.output_dir, "--store")
    log.remark(
        f"the training state remains in {store_at(config)}; {delete} deletes it, after which the run cannot be resumed"
    )


def _save_end(run: _Run, training: Training, facts: RunFacts) -> None:
    """Write why the run ended, and which step is exported as the best one."""
    step = training.best_saved.step
    if training.ended_early_at is None and step is None:
        return
    facts = replace(facts, ended_early_at=training.ended_early_at, exported_step=step)
    write_run_files(run.context.config, {FACTS_NAME: facts.to_json()}, log=run.context.log)


def _planned(run: _Run, cached: ModelProfile | None) -> tuple[ModelProfile, Plan]:
    """The profile and the plan of the first step. A model that no run has recorded is tried and measured."""
    context, planner = run.context, run.planner
    make_plan = partial(plan_split, planner, is_new=run.store is None) if run.written.split is None else planner.plan
    profile = cached or estimated_profile(planner, run.inputs.model)
    plan = make_plan(profile)
    if cached is None:
        data, model = run.inputs.data, run.inputs.model
        num_steps = 1 if data.filling is None else min(_STEPS_LOOKED_AT, data.steps_per_epoch)
        batches = [batch for step in range(num_steps) for batch in data.step(step)]
        measured = tried_profile(context, model, batches, planner, plan, profile, is_packed=data.is_packed)
        if measured is not None:
            profile, plan = measured, make_plan(measured)
    report_other_load(run.meter, context.log)
    return profile, plan


def _announce(run: _Run) -> RunFacts:
    """The facts. Those of a new run are written before its import, which may take long, so that `status` shows it."""
    facts = facts_of(run.inputs, run.identity, first_step=run.first_step)
    if run.store is None:
        write_run_files(run.context.config, {FACTS_NAME: facts.to_json()}, log=run.context.log)
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


def _save_plan(run: _Run, cache: CachedProfile, facts: RunFacts, plan: Plan, profile: ModelProfile) -> None:
    """Write the files in `run/` that the plan, and the profile that it was made from, belong to."""
    contents = {
        FACTS_NAME: facts.to_json(),
        HARDWARE_NAME: run.hardware.to_json(),
        MODEL_NAME: cache.content(run.planner.spec, profile),
        PLAN_NAME: {**plan.to_json(), "is_split_planned": run.written.split is None},
    }
    write_run_files(run.context.config, contents, log=run.context.log)


def _branch(context: RunContext, inputs: Inputs, store: Store | None, origin: Origin | None) -> Branch | None:
    """The step of another run that a new run starts from; None if the run begins with its base model, or resumes."""
    if origin is None:
        return None
    if store is not None:
        check_same_origin(context.config, origin)
        return None
    return open_branch(context, inputs, origin)


def _first_step(context: RunContext, inputs: Inputs, store: Store | None, start: Start) -> int:
    """The step that the run begins or resumes after. Reports another length than before. Raises BadInput."""
    if store is None:
        return 0
    check_decay(context.config, inputs.model.spec)
    step = start.step if isinstance(start, GoBack) else store.progress.step
    notice = check_length(
        context.config,
        first_step=step,
        steps_per_epoch=inputs.data.steps_per_epoch,
        rounds_up=inputs.rounds_up,
        saved_steps=store.pinned_steps,
    )
    if notice is not None:
        context.log.notice(notice)
    return step


def _opening_rows(run: _Run, plan: Plan) -> list[tuple[str, str]]:
    config, data = run.context.config, run.inputs.data
    rows = opening(
        run.inputs.model.spec,
        plan,
        run.hardware,
        dtype=config.dtype,
        samples=data.num_samples,
        data_tokens=data.num_tokens,
        loss_share=data.loss_share,
        num_steps=run.inputs.num_steps,
        first_step=run.first_step,
        engine=run.context.queue.engine,
        paths=config.storage.paths,
        output_dir=config.output_dir,
        taken_bytes=taken_bytes(config.storage.paths),
        split=split_words(plan.workload, is_planned=run.written.split is None, num_ranks=run.context.ranks.size),
        endurance_tb=config.storage.endurance_tb,
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


def _check_wear_limit(run: _Run) -> None:
    """Warn if `storage.max_tb_written` will end the run too early. Raises EnvironmentFailure if it allows no step at
    all."""
    config, first_step, num_steps = run.context.config, run.first_step, run.inputs.num_steps
    record = None if run.store is None else read_origin(config)
    limit = wear_limit(
        config,
        run.inputs.model.spec.sliced(run.context.ranks.slice).stored_blocks,
        shares=run.hardware.nvme.shares,
        first_step=run.branch.progress.step if run.branch else record.first_step if record else 0,
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


def _check_limits(run: _Run, plan: Plan, spaces: Sequence[Space]) -> None:
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
