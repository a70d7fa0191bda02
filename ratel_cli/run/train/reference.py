"""The log-probabilities of the reference model: those of the model before step 1, computed before step 1.

Only the answers of steps that the run will have are computed, a block of the model at a time, and in the micro-batches
of the first epoch, so that the rewards of step 1 are zero. They are kept in `run/reference.bin`, next to the tokens. A
run that resumes finds them; one that was killed while they were computed goes on with those that are missing, and so
does one that has become longer, or has other samples for evaluation.

Invariants: the reference is the base model as the run has read it, with its new adapter if it has one, which changes
nothing before step 1; or the step of another run that this one started from. All ranks choose from the same list what
each computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ratel_cli.data.batches.dataset import TrainingData
from ratel_cli.data.pairs.compared_samples import ComparedSamples
from ratel_cli.data.pairs.reference import LogProbabilities, ReferenceOfSet, read_reference, write_reference
from ratel_cli.data.samples.packing import Integers, MicroBatch
from ratel_cli.engine.ranks.ranks import Ranks
from ratel_cli.engine.reading.block_reader import BlockSource, GenerationBlocks, SourceBlocks
from ratel_cli.engine.replay.loss import token_values
from ratel_cli.engine.steps.forward import BlockwiseForward
from ratel_cli.errors import BadInput, Diverged, EnvironmentFailure
from ratel_cli.json_fields import hash_of
from ratel_cli.model.cut.preferences import answer_sums
from ratel_cli.model.files.directory import sampled_weights_hash
from ratel_cli.model.values.finished import Finished
from ratel_cli.planning.profile.activations import head_chunk_tokens, logits_bytes
from ratel_cli.run.context import RunContext
from ratel_cli.run.files.origin import OriginRecord, read_origin
from ratel_cli.run.files.run_directory import NEW_REFERENCE_NAME, REFERENCE_NAME, run_directory
from ratel_cli.run.files.run_files import forget_missing, list_run_files
from ratel_cli.run.inputs.inputs import Inputs
from ratel_cli.run.inputs.settings import chunked_workload_of
from ratel_cli.run.inputs.streamed_blocks import BlockMemory, StreamedModel, fit_blocks, layer_bytes, open_reader
from ratel_cli.store.store import Store, StoreIdentity
from ratel_cli.units import align_up


def check_reference(
    context: RunContext, inputs: Inputs, identity: StoreIdentity, *, store: Store | None, origin: OriginRecord | None
) -> None:
    """Raise what computing the reference model would, as far as that is known before the run writes anything.

    `store`: None for a new run, for which nothing is computed yet. `origin`: the step of another run that it starts
    from, or has started from. Raises BadInput, DoesNotFit.
    """
    if not context.config.has_reference:
        return
    reference = _Reference.of(context, inputs, identity, origin, is_new=store is None)
    wanted = reference.missing()
    if wanted:
        _check_weights(context, inputs, reference, store)
        _fit(context, _model(inputs, SourceBlocks(inputs.source)), wanted)


def with_reference(context: RunContext, inputs: Inputs, store: Store, identity: StoreIdentity) -> Inputs:
    """The inputs with the log-probabilities of the reference model in their data, if its loss needs them.

    Raises BadInput if they are missing and cannot be computed any more, Diverged if they are not finite, DoesNotFit,
    EnvironmentFailure if they must be kept and cannot be, and what reading raises.
    """
    data = inputs.data
    if not context.config.has_reference:
        return inputs
    assert isinstance(data, TrainingData)
    reference = _Reference.of(context, inputs, identity, read_origin(context.config))
    reference.share(context.ranks)
    wanted = reference.missing()
    if wanted:
        _check_weights(context, inputs, reference, store)
        try:
            _compute(context, inputs, store, reference, wanted)
        finally:
            forget_missing(context.config.output_dir, [NEW_REFERENCE_NAME])
        assert not reference.missing()
    train, evaluation = (each.values for each in reference.sets)
    return replace(inputs, data=data.referring_to(train, evaluation))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A micro-batch to compute."""

    samples: ComparedSamples
    numbers: Integers
    """Numbers of its samples."""
    places: Integers
    """Places of its samples in `values`."""
    values: LogProbabilities
    """Where they go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    """The samples for training, or for evaluation; NaN where they are not computed."""

    key: str
    samples: ComparedSamples
    batches: Sequence[Integers]
    """The samples of each micro-batch that the run needs."""
    values: LogProbabilities

    def missing(self) -> list[_Part]:
        """The micro-batches with answers that are not computed yet."""
        both = ((numbers, self.samples.places(numbers)) for numbers in self.batches)
        return [
            _Part(samples=self.samples, numbers=numbers, places=places, values=self.values)
            for numbers, places in both
            if np.isnan(self.values[places]).any()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reference:
    """All log-probabilities of a run."""

    context: RunContext
    origin: OriginRecord | None
    """The step that they are of; None: they are the base model's."""
    weights: str | None
    """A hash of the base model's files, as they are now; None if it has none, or is not the reference."""
    known_weights: str | None
    """A hash of the base model's files that the known log-probabilities were computed with; None as in `weights`."""
    sets: tuple[_Set, _Set]
    """The samples for training, and for evaluation."""

    @classmethod
    def of(
        cls,
        context: RunContext,
        inputs: Inputs,
        identity: StoreIdentity,
        origin: OriginRecord | None,
        *,
        is_new: bool = False,
    ) -> _Reference:
        """What the run needs, with what its file has of that. `is_new`: what is there is another run's."""
        config, data = context.config, inputs.data
        assert isinstance(data, TrainingData) and data.compared is not None
        is_drawn = config.random_init or origin is not None
        weights = None if is_drawn else sampled_weights_hash(inputs.base.directory)
        file = None if is_new else read_reference(run_directory(config.output_dir) / REFERENCE_NAME)
        known = [identity.model_hash, identity.config_hash, identity.seed]
        known.append(None if origin is None else [origin.run, origin.step])
        sets, is_known = [], False
        # A step of another run may be gone when this one has become longer, so all of the epoch refers to it at once.
        num_steps = data.steps_per_epoch if origin else min(inputs.num_steps, data.steps_per_epoch)
        for samples, batches in zip(data.compared, data.compared_numbers(num_steps), strict=True):
            key, number = hash_of([*known, samples.fingerprint]), len(samples.used)
            found = None if file is None else file.values_of(key, number)
            is_known |= found is not None and number > 0
            values = np.full((number, 2), np.nan, dtype=np.float32) if found is None else found.copy()
            sets.append(_Set(key=key, samples=samples, batches=batches, values=values))
        known_weights = file.weights if file is not None and is_known else weights
        return cls(
            context=context, origin=origin, weights=weights, known_weights=known_weights, sets=(sets[0], sets[1])
        )

    def missing(self) -> list[_Part]:
        """The micro-batches of the run's steps, and of evaluations, with answers that are not computed yet."""
        return [part for each in self.sets for part in each.missing()]

    def share(self, ranks: Ranks) -> None:
        """Let all ranks have what any of them has: where several have it, that of the first."""
        if ranks.size == 1:
            return
        for values in (each.values for each in self.sets):
            of_ranks = ranks.gathered(values.reshape(-1).tolist())
            values[:] = np.nan
            for found in of_ranks:
                np.copyto(values, np.array(found, dtype=np.float32).reshape(values.shape), where=np.isnan(values))

    def write(self) -> None:
        """Keep what is known. Where it cannot be computed again later, raises EnvironmentFailure if that fails."""
        path = run_directory(self.context.config.output_dir) / REFERENCE_NAME
        try:
            list_run_files(self.context.config.output_dir, [REFERENCE_NAME, NEW_REFERENCE_NAME])
            kept = [ReferenceOfSet(key=each.key, values=each.values) for each in self.sets]
            write_reference(path, self.known_weights, kept)
        except OSError as error:
            message = f"{path}: cannot be written ({error.strerror})"
            if self.origin is not None:
                raise EnvironmentFailure(
                    f"{message}, and the step of {self.origin.run} may be gone when the run is resumed",
                    "make the directory writable, or free some space",
                ) from error
            self.context.log.warn(message)


def _compute(context: RunContext, inputs: Inputs, store: Store, reference: _Reference, wanted: list[_Part]) -> None:
    """Compute the micro-batches, each rank its part of them, and keep them: after each pass, which may take long."""
    ranks = context.ranks
    own = wanted[ranks.rank :: ranks.size]
    reference.write()
    with ExitStack() as resources:
        opened = replace(context, resources=resources)
        resources.callback(setattr, context.pool, "limit_bytes", context.pool.limit_bytes)
        is_base = reference.origin is None
        model = _model(inputs, SourceBlocks(inputs.source) if is_base else GenerationBlocks(store.current()))
        memory = _fit(opened, model, wanted)
        reader = open_reader(opened, model, memory)
        resources.enter_context(reader.device.translate_errors())
        chunk_tokens = head_chunk_tokens(model.spec, chunked_workload_of(context.config, model.spec))
        forward = BlockwiseForward[MicroBatch](inputs.model, reader)
        total = len(own) * len(model.spec.segments)
        advance = resources.enter_context(context.bar("computing the reference model", total))

        def sums(finished: Finished, batch: MicroBatch) -> LogProbabilities:
            assert batch.comparison is not None
            values = token_values(finished, chunk_tokens=chunk_tokens).view_as(batch.targets)
            of_rows: LogProbabilities = answer_sums(values, batch.comparison).cpu().numpy()
            return of_rows.reshape(2, -1).T

        batches, waiting = (part.samples.batch(part.numbers) for part in own), iter(own)
        for of_pass in forward.measured(batches, sums, held_bytes=memory.left_bytes, progress=advance):
            for _, found in of_pass:
                if not np.isfinite(found).all():
                    raise Diverged(
                        "the reference log-probabilities are not finite",
                        "check the files of base_model, or train with dtype: float32",
                    )
                part = next(waiting)
                part.values[part.places] = found
            reference.write()
    context.pool.trim()
    if ranks.size > 1:
        ranks.wait_for_all()
        reference.share(ranks)
        reference.write()


def _model(inputs: Inputs, blocks: BlockSource) -> StreamedModel[Any]:
    return StreamedModel(base=inputs.base, blocks=blocks, name="the reference model", conversion_bytes=0)


def _check_weights(context: RunContext, inputs: Inputs, reference: _Reference, store: Store | None) -> None:
    """Raise BadInput if the weights before step 1 are nowhere any more, or several ranks would have to read them."""
    origin = reference.origin
    if origin is None:
        if reference.weights != reference.known_weights:
            raise BadInput(
                f"base_model: the weights in {inputs.base.directory} changed since the run began, and some reference "
                "log-probabilities are still to be computed",
                "put the earlier files back, or start again with --resume no",
            )
        return
    if context.ranks.size > 1:
        raise BadInput(
            "the reference model is a step of another run, which is not supported with several ranks",
            "export that step with `ratel export RUN -o DIR`, and set base_model: DIR",
        )
    if store is not None and store.progress.step != origin.first_step:
        raise BadInput(
            f"run/{REFERENCE_NAME} lacks reference log-probabilities that this run needs, and {origin.run}, where "
            "they came from, was trained further",
            "put the earlier test_datasets back, or start again with --resume no",
        )


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
