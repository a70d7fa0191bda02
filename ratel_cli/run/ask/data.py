"""The content of `ratel data`: what a run would train on, without its weights and its store.

Invariant: nothing is written but into a temporary directory and the user's cache. The tokens of an earlier start of the
run are used if they are there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

import numpy as np

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.batches.dataset import TrainingData
from ratel_cli.data.files.file_names import REJECTS_NAME
from ratel_cli.data.files.lines import Reject
from ratel_cli.data.samples.summary import DataReport, ShownSample
from ratel_cli.data.samples.token_cache import TokenCache
from ratel_cli.data.sources.load_tokens import TokenFiles
from ratel_cli.data.sources.statistics import first_samples, statistics_of
from ratel_cli.data.text.rows import Compares
from ratel_cli.data.text.tokenizer import NoTokenizer, Tokenizer
from ratel_cli.errors import BadInput
from ratel_cli.run.files.run_directory import TOKENS_NAME
from ratel_cli.run.inputs.build_language import read_language_base
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.records import temporary_records
from ratel_cli.run.inputs.text_data import SHOWS_REJECTS, load_data, read_fitting_tokenizer, shared_tokens
from ratel_cli.sizes import IGNORED_TARGET, Task


class RowsRejected(BadInput):
    """The data cannot be used; these rows are among the reasons."""

    def __init__(self, error: BadInput, rejects: list[Reject]) -> None:
        super().__init__(error.message, error.hint, others=error.others)
        self.rejects = rejects


def inspect_data(config: RunConfig, log: RunLog, *, num_samples: int, num_rejects: int) -> DataReport:
    """Read, tokenise and pack the config's data. Raises BadInput, EnvironmentFailure; RowsRejected with the rows."""
    prepare_process()
    base = read_language_base(config, log)
    tokenizer = read_fitting_tokenizer(config, base, log)
    packing = config.sample_packing and config.rl is None and base.model.packs
    with ExitStack() as resources:
        directory = temporary_records(config, resources)
        try:
            data = load_data(
                config,
                base,
                tokenizer,
                packing=packing,
                files=TokenFiles(
                    cache_dir=directory / TOKENS_NAME,
                    rejects_path=directory / REJECTS_NAME,
                    rejects_shown_by=SHOWS_REJECTS,
                    shared=resources.enter_context(shared_tokens(log, copies=False)),
                ),
                log=log,
            )
        except BadInput as error:
            rejects = _read_rejects(directory, num_rejects)
            if not rejects:
                raise
            raise RowsRejected(error, rejects) from error
        rejects = _read_rejects(directory, num_rejects)
        return _report(config, data, tokenizer, base.labels, num_samples=num_samples, rejects=rejects)


def _report(
    config: RunConfig,
    data: TrainingData,
    tokenizer: Tokenizer,
    labels: Sequence[str],
    *,
    num_samples: int,
    rejects: list[Reject],
) -> DataReport:
    names = [dataset.path for dataset in config.datasets]
    test_names = [dataset.path for dataset in config.test_datasets]
    per_sample = config.rows_per_sequence
    wanted = first_samples(data.cache, names, num_samples, per_sample=per_sample)
    first_label = 1 if config.task == "causal_lm" else 0
    counted = partial(statistics_of, first_label=first_label, per_sample=per_sample)
    return DataReport(
        sets=counted(data.cache, names),
        test_sets=counted(data.eval_cache, test_names) if test_names else [],
        num_samples=data.num_samples,
        num_tokens=data.num_tokens,
        num_sequences=data.num_sequences,
        num_held_out=0 if test_names else data.num_eval_samples,
        steps_per_epoch=data.steps_per_epoch,
        packing_efficiency=data.packing_efficiency,
        is_packed=data.is_packed,
        samples=[
            replace(_shown(data.cache, tokenizer, config.task, labels, (name, number, at)), answer=answer)
            for name, number, first in wanted
            for at, answer in _answers(data.cache, first, config.compares)
        ],
        rejects=rejects,
    )


def _answers(cache: TokenCache, first: int, compares: Compares | None) -> list[tuple[int, str | None]]:
    """The cache's samples that are answers of the sample which begins with `first`, each with what it is."""
    if compares == "pairs":
        return [(first, "chosen"), (first + 1, "rejected")]
    if compares == "verdicts":
        (prompt,) = cache.read(np.array([first + 1]))
        return [(first, "good" if prompt.labels[0] else "bad")]
    return [(first, None)]


def _shown(
    cache: TokenCache, tokenizer: Tokenizer, task: Task, labels: Sequence[str], place: tuple[str, int, int]
) -> ShownSample:
    dataset, number, sample_id = place
    (sample,) = cache.read(np.array([sample_id]))
    ids = [int(each) for each in sample.input_ids]
    has_loss = [False, *(int(label) != IGNORED_TARGET for label in sample.labels[1:])]
    label = labels[int(sample.labels[0])] if task == "classification" else None
    parts = []
    for flag, group in groupby(zip(has_loss, ids, strict=True), key=itemgetter(0)):
        part = [each for _, each in group]
        parts.append((_decoded(tokenizer, part), flag))
    return ShownSample(
        dataset=dataset,
        number=number,
        parts=tuple(parts),
        input_ids=tuple(ids),
        has_loss=tuple(has_loss),
        label=label,
        may_be_masked=task == "masked_lm",
    )


def _decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text of some tokens; without a tokenizer, their ids."""
    if isinstance(tokenizer, NoTokenizer):
        return "".join(f" {each}" for each in ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _read_rejects(directory: Path, most: int) -> list[Reject]:
    found: list[Reject] = []
    for path in sorted(directory.glob(f"*{REJECTS_NAME}")):
        with path.open(encoding="utf-8") as file:
            found.extend(Reject(**json.loads(line)) for line in islice(file, most - len(found)))
    return found
