"""`ratel eval`: the loss of a model on the rows of a file, with one block of the model in memory at a time.

Rows go the way of training: its types, its chat template, its tokenizer, its packing.

Invariants: every token with loss counts once, whatever shares a micro-batch or a pass; nothing is written but into a
temporary directory.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from time import perf_counter

from ratel_cli.commands import command
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.batches.dataset import TrainingData
from ratel_cli.data.samples.packing import MicroBatch
from ratel_cli.data.sources.load_tokens import TokenFiles
from ratel_cli.engine.replay.loss import NOTHING_EVALUATED
from ratel_cli.engine.steps.forward import BlockwiseForward
from ratel_cli.errors import BadInput, Diverged
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.planning.profile.activations import logits_bytes, tokens_per_chunk
from ratel_cli.report.words.evaluation import EvaluationReport
from ratel_cli.run.ask.streamed import completed, open_merged, open_streamed
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.named_model import NamedModel, overrides_for_data, with_data, with_rows
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.streamed_blocks import BlockMemory, StreamedModel, fit_blocks, layer_bytes, open_reader
from ratel_cli.run.inputs.text_data import check_positions, load_data, read_fitting_tokenizer, shared_tokens
from ratel_cli.sizes import LOGITS_CHUNK_BYTES

FEW_SAMPLES = 8
"""Enough to see whether two models are the same."""


def evaluate(
    named: NamedModel, data: str, log: RunLog, *, overrides: tuple[str, ...], step: int | None
) -> EvaluationReport:
    """The loss of the model on the rows of `data`. Raises RatelError; Diverged if the loss is not finite."""
    prepare_process()
    config = with_data(completed(named), data, overrides)
    shown_by = None  # a model that no run has made has no data of its own
    if named.run is not None:
        shown_by = command("data", named.run, *overrides_for_data(named.config, data, overrides), "--bad")
    return _evaluate_all(config, log, lambda context: iter([open_streamed(context, named, step)]), shown_by)[0]


def evaluate_merged(config: RunConfig, step: int, log: RunLog) -> list[EvaluationReport]:
    """The losses of a step of a run beside a quantised base, and of what its merges give, on the run's first few rows
    for evaluation, or for training. Raises RatelError, as `evaluate`; BadInput if the rows are not there, or are
    preference data."""
    if config.rl is not None:
        raise BadInput("its rows are preference data, which has no loss without the other answer")
    rows = (config.test_datasets or config.datasets)[0].model_copy(update={"max_samples": FEW_SAMPLES, "weight": 1})
    is_stream = config.streaming and not config.test_datasets  # of which no more is read than that
    config = with_rows(config, rows).model_copy(update={"streaming": is_stream})
    return _evaluate_all(config, log, lambda context: open_merged(context, step))


def _evaluate_all(
    config: RunConfig,
    log: RunLog,
    open_models: Callable[[RunContext], Iterator[StreamedModel[LanguageBase]]],
    rejects_shown_by: str | None = None,
) -> list[EvaluationReport]:
    """Evaluate each model on the same rows."""
    device = compute_device(config.device)
    with (
        determinism(config.deterministic, device, notice=log.notice),
        open_context(config, log, device=device) as context,
    ):
        models = open_models(context)
        first = next(models)
        rows = _read_rows(context, first.base, rejects_shown_by=rejects_shown_by)
        context.listen()
        return [_evaluate(context, each, rows) for each in chain([first], models)]


def _read_rows(context: RunContext, base: LanguageBase, *, rejects_shown_by: str | None) -> TrainingData:
    """The rows in sequences."""
    config, log = context.config, context.log
    tokenizer = read_fitting_tokenizer(config, base, log)
    check_positions(config.sequence_len, base.model, base.config, log)
    directory = context.resources.enter_context(tempfile.TemporaryDirectory(prefix="ratel-eval-"))
    return load_data(
        config,
        base,
        tokenizer,
        packing=config.sample_packing and base.model.packs,
        files=TokenFiles(
            cache_dir=Path(directory),
            rejects_path=None,
            rejects_shown_by=rejects_shown_by,
            shared=context.resources.enter_context(shared_tokens(log, copies=False)),
        ),
        log=log,
    )


def _evaluate(context: RunContext, streamed: StreamedModel[LanguageBase], rows: TrainingData) -> EvaluationReport:
    config, spec, data = context.config, streamed.spec, context.config.datasets[0].path
    chunk_tokens = tokens_per_chunk(
        spec.vocab_size, LOGITS_CHUNK_BYTES if config.head_chunk == "auto" else config.head_chunk
    )
    memory = _fit(context, streamed, rows, chunk_tokens)
    num_batches = -(-rows.num_sequences // _batch_size(config))
    total, start = NOTHING_EVALUATED, perf_counter()
    reader = open_reader(context, streamed, memory)
    with reader.device.translate_errors(), context.bar("evaluating", num_batches * len(spec.segments)) as advance:
        forward = BlockwiseForward(streamed.base.model, reader)
        for found in forward.evaluated(
            _batches(rows), held_bytes=memory.left_bytes, chunk_tokens=chunk_tokens, progress=advance
        ):
            total = total.and_of(found.sums)
    loss = total.mean_loss
    if not math.isfinite(loss):
        raise Diverged(
            f"{data}: the loss is {loss}: logits are not finite",
            "check the weights with `ratel verify CONFIG`, or evaluate with dtype=float32",
        )
    return EvaluationReport(
        model=streamed.name,
        data=data,
        loss=loss,
        accuracy=total.accuracy,
        perplexity=math.exp(min(loss, 700.0)),
        num_samples=rows.num_samples,
        num_rejected=rows.rejected,
        num_tokens=rows.num_tokens,
        num_loss_tokens=total.num_targets,
        num_sequences=rows.num_sequences,
        sequence_len=config.sequence_len,
        is_packed=rows.is_packed,
        dtype=config.dtype,
        seconds=perf_counter() - start,
        bytes_read=reader.bytes_read,
    )


def _fit(
    context: RunContext,
    streamed: StreamedModel[LanguageBase],
    rows: TrainingData,
    chunk_tokens: int,
) -> BlockMemory:
    """The memory for the widest micro-batch: all packed sequences are as wide as that."""
    config, spec, size = context.config, streamed.spec, _batch_size(context.config)
    width = config.sequence_len if rows.is_packed else int(rows.cache.lengths.max())
    layer = layer_bytes(streamed.base.model, batch_size=size, num_tokens=width)
    head = logits_bytes(spec, min(chunk_tokens, size * width))
    hidden_bytes = size * width * spec.passed_bytes
    return fit_blocks(
        context,
        streamed,
        working_bytes=max(layer, head + 3 * hidden_bytes),
        least_bytes=hidden_bytes,
        what="evaluating",
        hint=", or lower micro_batch_size or sequence_len",
    )


def _batches(rows: TrainingData) -> Iterator[MicroBatch]:
    """Every sequence once, in the order of the rows."""
    for step in range(rows.steps_per_epoch):
        yield from rows.step(step)


def _batch_size(config: RunConfig) -> int:
    return 1 if config.split is None else config.split[0]
