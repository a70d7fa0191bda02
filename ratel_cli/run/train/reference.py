"""The log-probabilities of the reference model: those of the model before step 1, computed before step 1.

Only the answers of steps that the run will have are computed, a block of the model at a time, and in the micro-batches
of the first epoch, so that the rewards of step 1 are zero. They are kept in `run/reference.bin`, next to the tokens. A
run that resumes finds them; one that was killed while they were computed goes on with those that are missing, and so
does one that has become longer.

Invariant: the reference is the base model as the run has read it, with its new adapter if it has one, which changes
nothing before step 1; or the step of another run that this one started from.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from ratel_cli.data.compared_samples import ComparedSamples
from ratel_cli.data.dataset import TrainingData
from ratel_cli.data.packing import Integers, MicroBatch
from ratel_cli.data.reference import LogProbabilities, read_reference, write_reference
from ratel_cli.engine.block_reader import BlockSource, GenerationBlocks, SourceBlocks
from ratel_cli.engine.build import open_device
from ratel_cli.engine.forward import BlockwiseForward
from ratel_cli.engine.loss import token_values
from ratel_cli.engine.telemetry import Timeline
from ratel_cli.errors import BadInput
from ratel_cli.json_fields import hash_of
from ratel_cli.model.finished import Finished
from ratel_cli.model.preferences import answer_sums
from ratel_cli.planning.activations import head_chunk_tokens, logits_bytes
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.origin import read_origin
from ratel_cli.run.files.run_directory import REFERENCE_NAME, run_directory
from ratel_cli.run.files.run_files import list_run_files
from ratel_cli.run.inputs.inputs import Inputs
from ratel_cli.run.inputs.settings import chunked_workload_of
from ratel_cli.run.inputs.streamed_blocks import BlockMemory, StreamedModel, fit_blocks, layer_bytes, open_reader
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.units import align_up

_SAVED_EVERY_SECONDS = 60.0


def with_reference(context: RunContext, inputs: Inputs, store: Store, identity: StoreIdentity) -> Inputs:
    """The inputs with the log-probabilities of the reference model in their data, if its loss needs them.

    Raises BadInput if they are missing and cannot be computed any more, DoesNotFit, and what reading raises.
    """
    data = inputs.data
    if not context.config.has_reference:
        return inputs
    assert isinstance(data, TrainingData) and data.compared is not None
    found = _Reference.read(context, data, identity)
    wanted = found.missing(_steps_to_refer(context, inputs))
    if any(number for (number,) in context.ranks.gathered([len(wanted)])):
        _compute(context, inputs, store, found, wanted)
    return replace(inputs, data=data.referring_to(found.train, found.evaluation))


def _steps_to_refer(context: RunContext, inputs: Inputs) -> int:
    """How many steps' answers are computed: those of the run, or of an epoch if that is less. What is started from
    another run's step refers to the whole epoch, because that step may be gone when the run has become longer."""
    steps_per_epoch = inputs.data.steps_per_epoch
    return steps_per_epoch if read_origin(context.config) else min(inputs.num_steps, steps_per_epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A micro-batch to compute."""

    samples: ComparedSamples
    numbers: Integers
    """Of its samples."""
    values: LogProbabilities
    """Where they go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """All log-probabilities of a run; NaN where they are not computed."""

    context: RunContext
    data: TrainingData
    key: str
    train: LogProbabilities
    evaluation: LogProbabilities

    @classmethod
    def read(cls, context: RunContext, data: TrainingData, identity: StoreIdentity) -> _Reference:
        """Those in the run's file, as far as they are there."""
        assert data.compared is not None
        number, number_of_eval = map(len, data.compared)
        origin = read_origin(context.config)
        known = [identity.model_hash, identity.config_hash, identity.data_hash, identity.seed]
        key = hash_of([*known, None if origin is None else [origin.run, origin.step]])
        path = run_directory(context.config.output_dir) / REFERENCE_NAME
        found = read_reference(path, key, (number, number_of_eval))
        train, evaluation = found or (_unknown(number), _unknown(number_of_eval))
        return cls(context=context, data=data, key=key, train=train.copy(), evaluation=evaluation.copy())

    def missing(self, num_steps: int) -> list[_Part]:
        """The micro-batches of these steps, and of evaluations, with answers that are not computed yet."""
        assert self.data.compared is not None
        both = zip(
            self.data.compared, self.data.compared_numbers(num_steps), (self.train, self.evaluation), strict=True
        )
        return [
            _Part(samples=samples, numbers=numbers, values=values)
            for samples, of_batches, values in both
            for numbers in of_batches
            if np.isnan(values[numbers]).any()
        ]

    def write(self) -> None:
        """Keep what is known. If that is not possible, training goes on without the file."""
        directory = run_directory(self.context.config.output_dir)
        try:
            list_run_files(self.context.config.output_dir, [REFERENCE_NAME])
            write_reference(directory / REFERENCE_NAME, self.key, self.train, self.evaluation)
        except OSError as error:
            self.context.log.warn(f"{directory / REFERENCE_NAME}: cannot be written ({error.strerror})")


def _unknown(number: int) -> LogProbabilities:
    return np.full((number, 2), np.nan, dtype=np.float32)


def _compute(context: RunContext, inputs: Inputs, store: Store, reference: _Reference, wanted: list[_Part]) -> None:
    """Compute the micro-batches, each rank its part of them, and keep them."""
    ranks = context.ranks
    own = wanted[ranks.rank :: ranks.size]
    with ExitStack() as resources:
        opened = replace(context, resources=resources)
        resources.callback(setattr, context.pool, "limit_bytes", context.pool.limit_bytes)
        model = StreamedModel(
            base=inputs.base, blocks=_weights_of_reference(context, inputs, store), name="the reference model",
            conversion_bytes=0,
        )  # fmt: skip
        memory = _fit(opened, model, wanted)
        device = resources.enter_context(open_device(context.device, Timeline()))
        resources.enter_context(device.translate_errors())
        reader = open_reader(opened, model, memory)
        chunk_tokens = head_chunk_tokens(model.spec, chunked_workload_of(context.config, model.spec))
        forward = BlockwiseForward[MicroBatch](inputs.model, reader)
        total = len(own) * len(model.spec.segments)
        advance = resources.enter_context(context.bar("computing the reference model", total))

        def sums(finished: Finished, batch: MicroBatch) -> LogProbabilities:
            assert batch.comparison is not None
            values = token_values(finished, chunk_tokens=chunk_tokens).view_as(batch.targets)
            of_rows: LogProbabilities = answer_sums(values, batch.comparison).cpu().numpy()
            return of_rows.reshape(2, -1).T

        saved = perf_counter()
        batches = (part.samples.batch(part.numbers) for part in own)
        measured = forward.measured(batches, sums, held_bytes=memory.left_bytes, progress=advance)
        for part, (_, found) in zip(own, measured, strict=True):
            part.values[part.numbers] = found
            if perf_counter() - saved > _SAVED_EVERY_SECONDS:
                reference.write()
                saved = perf_counter()
    context.pool.trim()
    if ranks.size > 1:
        ranks.wait_for_all()
        for values in (reference.train, reference.evaluation):
            _share(context, values)
    reference.write()


def _share(context: RunContext, values: LogProbabilities) -> None:
    """Take what other ranks have computed."""
    for of_rank in context.ranks.gathered(values.reshape(-1).tolist()):
        found = np.array(of_rank, dtype=np.float32).reshape(values.shape)
        np.copyto(values, found, where=np.isnan(values))


def _weights_of_reference(context: RunContext, inputs: Inputs, store: Store) -> BlockSource:
    """The weights before step 1. Raises BadInput if they are nowhere any more."""
    origin = read_origin(context.config)
    if origin is None:
        return SourceBlocks(inputs.source)
    if context.ranks.size > 1:
        raise BadInput(
            "the reference model is a step of another run, which several ranks cannot compute",
            "export that step with `ratel export RUN -o DIR`, and set base_model: DIR",
        )
    if store.progress.step != origin.first_step:
        raise BadInput(
            f"run/{REFERENCE_NAME} is missing or damaged, and the step of {origin.run} that it was made from is trained"
            " further",
            "start again with --resume no",
        )
    return GenerationBlocks(store.current())


def _fit(context: RunContext, model: StreamedModel[Any], wanted: list[_Part]) -> BlockMemory:
    """The memory for the widest micro-batch."""
    spec = model.spec
    rows = 2 * max(len(part.numbers) for part in wanted)
    width = max(align_up(int(part.samples.widths[part.numbers].max()), part.samples.multiple) for part in wanted)
    chunk_tokens = head_chunk_tokens(spec, chunked_workload_of(context.config, spec))
    layer = layer_bytes(model.base.model, batch_size=rows, num_tokens=width)
    hidden_bytes = rows * width * spec.passed_bytes
    return fit_blocks(
        context,
        model,
        working_bytes=max(layer, logits_bytes(spec, min(chunk_tokens, rows * width)) + 3 * hidden_bytes),
        least_bytes=hidden_bytes,
        what="computing the reference model",
        hint=", or lower micro_batch_size or sequence_len",
    )
