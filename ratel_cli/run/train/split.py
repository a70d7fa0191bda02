"""The split of a run's steps into micro-batches, and the chunks of its head, where the config leaves them to the plan.

Both decide the order in which gradients are summed. So the first start chooses them, from shapes and the memory that is
free then, and the store's identity keeps them (`as_recorded` in run/inputs/settings.py).

Invariant: neither changes during a run, whatever would be faster or fit now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.errors import DoesNotFit
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.planning.search.head_chunk import best_chunk, with_chunk
from ratel_cli.planning.search.plan import Plan
from ratel_cli.planning.search.split import LEAST_GAIN, SplitRate, best_split
from ratel_cli.run.context import RunContext
from ratel_cli.run.inputs.inputs import Inputs
from ratel_cli.run.train.planner import Planner, estimated_profile, make_planner
from ratel_cli.run.train.ranks import with_shape_of_first
from ratel_cli.units import counted


def shaped_by_plan(
    context: RunContext, inputs: Inputs, hardware: HardwareProfile, written: RunConfig
) -> tuple[RunContext, Inputs]:
    """Return both with the split, and the chunks of the head, that the plan chooses where the config names none.

    Of splits that do not fit, the one that comes closest; chunks in the same way. Of several ranks, all have what the
    first one chooses where `written` leaves it to the plan.
    """
    config, ranks = context.config, context.ranks
    if config.split is None or config.is_chunk_planned:
        config, inputs = _chosen(context, inputs, hardware)
    if ranks.size > 1:
        config = with_shape_of_first(ranks, config, written)
        inputs = replace(inputs, data=inputs.data.split_by(config.known_split[0]))
    return replace(context, config=config), inputs


def _chosen(context: RunContext, inputs: Inputs, hardware: HardwareProfile) -> tuple[RunConfig, Inputs]:
    """The config with what this rank's plan chooses, and the inputs in this split."""
    config = context.config
    unsplit = replace(context, config=config if config.split else config.split_by(1))
    planner = make_planner(unsplit, inputs.model.spec, hardware)
    profile = estimated_profile(planner, inputs.model)
    if config.split is None:
        best = best_split(planner.workload, _rates(planner, profile, is_chunk_planned=config.is_chunk_planned))
        planner = replace(planner, workload=best.workload)
        config = config.split_by(best.workload.micro_batch_size)
        inputs = replace(inputs, data=inputs.data.split_by(best.workload.micro_batch_size))
    if config.is_chunk_planned:
        config = config.chunked_by(_best_chunk(planner, profile))
    return config, inputs


def plan_split(planner: Planner, profile: ModelProfile, *, is_new: bool) -> Plan:
    """The plan of a run whose split a plan chose: now, or when the run began. Raises DoesNotFit in these terms."""
    try:
        return planner.plan(profile)
    except DoesNotFit as failure:
        message = f"no split of {planner.workload.tokens} tokens into micro-batches fits; "
        message += f"{_words(planner.workload)} comes closest: {failure.message}"
        hint = "raise the limits, or lower tokens_per_step or sequence_len"
        if not is_new:
            message = f"the split that this run began with, {_words(planner.workload)}, does not fit any more: "
            message += failure.message
            hint = "free memory or raise the limits; the split cannot change during a run, but --resume no starts over"
        raise DoesNotFit(
            message, hint, shortfall_bytes=failure.shortfall_bytes, is_gpu_memory=failure.is_gpu_memory
        ) from failure


def report_better_split(planner: Planner, profile: ModelProfile, plan: Plan, log: RunLog) -> None:
    """Print a line if another split would be faster now than the one of a run that resumes."""
    best = best_split(planner.workload, _rates(planner, profile))
    gain = best.tokens_per_second / plan.tokens_per_second - 1
    if gain > LEAST_GAIN:
        log.say(
            f"the run keeps the split that it began with, {_words(planner.workload)}; "
            f"the plan would now choose {_words(best.workload)}, {100 * gain:.0f} % faster"
        )


def _rates(
    planner: Planner, profile: ModelProfile, *, is_chunk_planned: bool = False
) -> Callable[[Workload], SplitRate]:
    """What each split is predicted to give, by one profile; `is_chunk_planned`: with the best chunks of the head."""

    def rate(workload: Workload) -> SplitRate:
        split = replace(planner, workload=workload)
        if is_chunk_planned:
            chunk_bytes = _best_chunk(split, profile)
            split = replace(split, workload=with_chunk(split.spec, workload, chunk_bytes))
        try:
            plan = split.plan(profile.of_tokens(workload.micro_batch_tokens))
        except DoesNotFit as failure:
            return SplitRate(workload=workload, tokens_per_second=0.0, shortfall_bytes=failure.shortfall_bytes)
        return SplitRate(workload=workload, tokens_per_second=plan.tokens_per_second, shortfall_bytes=0)

    return rate


def _best_chunk(planner: Planner, profile: ModelProfile) -> int:
    """Bytes of logits that the head should compute at once."""
    of_split = profile.of_tokens(planner.workload.micro_batch_tokens)
    return best_chunk(planner.problem(of_split, planner.decisions))


def _words(workload: Workload) -> str:
    number = counted(workload.num_micro_batches, "micro-batch", "micro-batches")
    return f"{number} of {counted(workload.micro_batch_size, 'sequence')}"
