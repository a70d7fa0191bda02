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

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ratel_cli.commands import command
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.engine.ranks.processes import open_ranks
from ratel_cli.engine.ranks.remote import read_by_first
from ratel_cli.errors import NotEnoughSpace
from ratel_cli.model.export.export_weights import ExportFiles
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.search.plan import Plan
from ratel_cli.planning.search.recorded_plan import plan_json
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.origin import Origin, read_origin
from ratel_cli.run.files.output import claim_output
from ratel_cli.run.files.run_directory import HARDWARE_NAME, MODEL_NAME, PLAN_NAME, CachedProfile, store_at
from ratel_cli.run.files.run_files import files_of_training, forget_missing, write_run_files
from ratel_cli.run.inputs.inputs import Inputs, facts_of
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.train.card import card_of
from ratel_cli.run.train.decided import DecidedRun, decide_run
from ratel_cli.run.train.hub import upload_export
from ratel_cli.run.train.open import slices_of
from ratel_cli.run.train.opening import check_limits, opening_rows
from ratel_cli.run.train.planner import estimated_profile
from ratel_cli.run.train.profile_machine import report_other_load
from ratel_cli.run.train.ranks import (
    RANK_TIMEOUT_SECONDS,
    check_same_options,
    common_beginning,
    config_of_rank,
    first_rank_first,
)
from ratel_cli.run.train.reference import with_reference
from ratel_cli.run.train.resharding import finish_resharding
from ratel_cli.run.train.snapshots import make_snapshot, space_rows, start_snapshots
from ratel_cli.run.train.space import spaces_of
from ratel_cli.run.train.split import plan_split, report_better_split
from ratel_cli.run.train.start import Resume, Start
from ratel_cli.run.train.store import make_store, resume_store
from ratel_cli.run.train.trackers import Trackers
from ratel_cli.run.train.train import Training
from ratel_cli.run.train.trial import tried_profile
from ratel_cli.store.joined import Readable
from ratel_cli.store.store import Store
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
        written = config_of_rank(config, ranks) if ranks.size > 1 else config
        check_same_options(ranks, start, dry_run, str(origin), origin is not None and origin.fresh_optimizer)
        with first_rank_first(ranks):
            if not ranks.rank and not dry_run:
                finish_resharding(written, log)
        record = read_origin(written)
        first_step = 0 if record is None else record.first_step
        begins = common_beginning(ranks, written.storage.paths, start, first_step=first_step)
        start = begins.start
        # Phases 1 and 2. From here on the config is the context's.
        run = decide_run(written, log, resources, begins, origin, ranks, dry_run=dry_run, overwrite=overwrite)
        context, inputs, planner, hardware = run.context, run.inputs, run.planner, run.hardware
        cache = CachedProfile(context.config, planner.spec, hardware)
        profile, plan = _planned(run, cache.read())
        spaces = spaces_of(
            context.config,
            inputs.model.spec,
            nvme_bytes=plan.nvme_bytes,
            own=inputs.model.spec.sliced(context.ranks.slice),
            layout=context.layout,
            export_bytes=ExportFiles(inputs.layout, inputs.base.sidecars(context.config)).num_bytes,
            shares=hardware.nvme.shares,
        )
        facts = facts_of(inputs, run.identity, first_step=run.first_step)
        log.facts([*opening_rows(run, plan, facts), *space_rows(context.config, spaces, hardware)])
        if run.is_split_planned and run.store is not None:
            report_better_split(planner, profile, plan, log)
        check_limits(run, plan, spaces)
        if dry_run:
            return

        with first_rank_first(ranks):
            claim_output(context.config)  # phase 3; from here on only what has changed meanwhile is refused
        context.listen()
        context.stop.must_resume = start != Resume()
        target = run.snapshot or make_snapshot(context, planner.spec, inputs.source, run.identity, start)
        if run.store is None:
            # Before the import, which may take long, so that `status` shows it.
            write_run_files(context.config, {FACTS_NAME: facts.to_json()}, log=log)
            shares = hardware.nvme.shares
            store = make_store(context, inputs, run.identity, start, shares=shares, branch=run.branch)
        else:
            store = run.store
            resume_store(context, store, start, num_steps=inputs.num_steps)

        save_plan = partial(_save_plan, run, cache, facts)
        save_plan(plan, profile)  # phase 4
        inputs = with_reference(context, inputs, store, run.identity)
        snapshots = start_snapshots(context, store, target, hardware)
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
            ExportFiles(inputs.layout, inputs.base.sidecars(config)),
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


def _save_end(run: DecidedRun, training: Training, facts: RunFacts) -> None:
    """Write why the run ended, and which step is exported as the best one."""
    step = training.best_saved.step
    if training.ended_early_at is None and step is None:
        return
    facts = replace(facts, ended_early_at=training.ended_early_at, exported_step=step)
    write_run_files(run.context.config, {FACTS_NAME: facts.to_json()}, log=run.context.log)


def _planned(run: DecidedRun, cached: ModelProfile | None) -> tuple[ModelProfile, Plan]:
    """The profile and the plan of the first step. A model that no run has recorded is tried and measured."""
    context, planner = run.context, run.planner
    make_plan = partial(plan_split, planner, is_new=run.store is None) if run.is_split_planned else planner.plan
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


def _save_plan(run: DecidedRun, cache: CachedProfile, facts: RunFacts, plan: Plan, profile: ModelProfile) -> None:
    """Write the files in `run/` that the plan, and the profile that it was made from, belong to."""
    contents = {
        FACTS_NAME: facts.to_json(),
        HARDWARE_NAME: run.hardware.to_json(),
        MODEL_NAME: cache.content(run.planner.spec, profile),
        PLAN_NAME: {**plan_json(plan), "is_split_planned": run.is_split_planned},
    }
    write_run_files(run.context.config, contents, log=run.context.log)
