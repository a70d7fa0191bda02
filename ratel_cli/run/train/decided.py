"""What a run of `ratel finetune` is, before its plan is made: what it reads, what its store decides, and its shape.

The config is bound once: `DecidedRun.context` has the one that all else follows. What was written says only what was
left to a plan.

Invariant: nothing is written to a store, except that a change of the number of ranks makes its new stores here.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.errors import BadInput
from ratel_cli.hardware.gpu import determinism
from ratel_cli.hardware.load import LoadMeter
from ratel_cli.hardware.shares import share_of
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.files.origin import Origin, OriginRecord, check_same_origin, read_origin
from ratel_cli.run.files.output import reject_lost_store
from ratel_cli.run.files.run_directory import store_at
from ratel_cli.run.inputs.filling import note_filling
from ratel_cli.run.inputs.inputs import Inputs, identity_of, read_inputs
from ratel_cli.run.inputs.length import check_length, num_steps, rounds_up
from ratel_cli.run.train.branch import Branch, open_branch
from ratel_cli.run.train.planner import Planner, estimated_profile, make_planner
from ratel_cli.run.train.profile_machine import measure_for_run
from ratel_cli.run.train.ranks import (
    Beginning,
    check_same,
    first_rank_first,
    layout_of,
    measured_in_turn,
    measured_network,
    share_origin,
    with_shape_of_first,
)
from ratel_cli.run.train.resharding import Resharding
from ratel_cli.run.train.snapshots import find_snapshot
from ratel_cli.run.train.split import shaped_by_plan
from ratel_cli.run.train.start import GoBack, Resume, Start
from ratel_cli.run.train.store import as_resumed, check_decay, find_store
from ratel_cli.store.open import START_OVER
from ratel_cli.store.store import Store, StoreIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedRun:
    """A run that is decided but for its plan. The config in its context is the one that all else follows."""

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
    is_split_planned: bool
    """Whether a plan splits the steps, now or when the run began."""
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


def decide_run(
    written: RunConfig,
    log: RunLog,
    resources: ExitStack,
    begins: Beginning,
    origin: Origin | None,
    ranks: Ranks,
    *,
    dry_run: bool,
    overwrite: bool,
) -> DecidedRun:
    """Read the inputs, open the store and its snapshot, if they exist, and measure the machine; choose what the config
    leaves to the plan, once and for all steps.

    `written`: the config as it was given. `config`: with what the store of the run decides, whose shape a new run has
    still to get.
    """
    start = begins.start
    change = Resharding.of(written, ranks, before=begins.ranks_before, dry_run=dry_run)
    own = written if change is None else change.shaped(written)
    config = with_shape_of_first(ranks, as_resumed(own, start), written)
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
    first_step = branch.source.progress.step if branch else _first_step(context, inputs, store, start)
    snapshot = find_snapshot(context, identity, start, has_store=store is not None)
    if store is None and start == Resume():
        reject_lost_store(config)

    context, inputs = shaped_by_plan(context, inputs, share, written)
    if context.config != config:  # a new run's store has the shape, too
        identity = identity_of(context.config, inputs)
    filling = inputs.data.filling  # of two texts, it reads steps
    note_filling(context.config, filling)
    return DecidedRun(
        context=context,
        inputs=inputs,
        identity=identity,
        store=store,
        snapshot=snapshot,
        branch=branch,
        first_step=first_step,
        is_split_planned=written.split is None,
        hardware=hardware,
        meter=meter,
        planner=make_planner(context, inputs.model.spec, share, filling=filling),
    )


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
