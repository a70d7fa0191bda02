"""The texts that a language model is trained on: its tokenizer, how long rows may be, and the rows as tokens.

Invariant: a tokenizer, a length or a row that the model cannot use is rejected by name before it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from transformers import PretrainedConfig

from ratel_cli.config.keys.schema import DatasetConfig, RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.batches.dataset import DataSettings, TrainingData
from ratel_cli.data.batches.load_data import load_training_data
from ratel_cli.data.files.file_names import REJECTS_NAME
from ratel_cli.data.sources.encode import Encoding
from ratel_cli.data.sources.load_tokens import TokenFiles
from ratel_cli.data.sources.row_check import check_rows
from ratel_cli.data.text.rows import DatasetSource, open_source
from ratel_cli.data.text.shared_tokens import SharedTokens
from ratel_cli.data.text.tokenizer import Tokenizer, num_ids
from ratel_cli.errors import BadInput, ErrorList
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.files.kind import text_config
from ratel_cli.run.context import bars_of
from ratel_cli.run.files.output import is_claimed
from ratel_cli.run.files.run_directory import TOKENS_NAME
from ratel_cli.run.files.run_files import names_of_rejects, note_rejects
from ratel_cli.run.files.user_cache import user_cache_directory
from ratel_cli.run.inputs.base import ReadData
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.records import records
from ratel_cli.run.inputs.tokenizer import read_stop_ids, tokenizer_files
from ratel_cli.units import align_up


def prepare_texts(config: RunConfig, base: LanguageBase, errors: ErrorList, log: RunLog) -> ReadData | None:
    """Check what the model reads texts with; what is wrong goes to `errors`. Returns what reads them, if it can."""
    tokenizer = errors.attempt(("base_model",), lambda: read_fitting_tokenizer(config, base, log))
    if tokenizer is not None:
        # That the export will have.
        errors.attempt(("base_model",), lambda: tokenizer_files(config, base.directory, base.read_tokenizer()))
        errors.attempt(("eot_tokens",), lambda: read_stop_ids(config, base.directory, base.config, tokenizer))
    errors.attempt(("sequence_len",), lambda: check_positions(config.sequence_len, base.model, base.config, log))
    errors.attempt(("sequence_len",), lambda: _check_row_length(config.sequence_len, base.model, base.config))
    if tokenizer is None:
        return None
    return lambda resources, dry_run: _read_texts(config, base, tokenizer, resources, log, dry_run=dry_run)


def find_texts(config: RunConfig, errors: ErrorList, log: RunLog, *, reads_rows: bool, knows_types: bool) -> None:
    """Find the files of all datasets of texts. What is wrong goes to `errors`.

    `reads_rows`: also what is wrong with local rows whatever the tokenizer is, and with `knows_types` by their types.
    """
    for key, datasets in (("datasets", config.datasets), ("test_datasets", config.test_datasets)):
        for number, source in enumerate(sources_of(config, datasets)):
            find = partial(open_source, source, notice=lambda text: None, is_stream=True)
            found = errors.attempt((key, number, "path"), find)
            if found is not None and reads_rows and not config.streaming:
                check = partial(check_rows, found, knows_type=knows_types, open_bar=bars_of(log))
                errors.attempt((key, number, "path"), check)


def _read_texts(
    config: RunConfig, base: LanguageBase, tokenizer: Tokenizer, resources: ExitStack, log: RunLog, *, dry_run: bool
) -> TrainingData:
    """The data of a run on this model. Raises BadInput, EnvironmentFailure."""
    packing = config.sample_packing and config.rl is None
    if packing and not base.model.packs and config.task == "causal_lm":
        log.notice(why_not_packed(base.config.model_type, base.attention))
    directory = records(config, resources, dry_run=dry_run)
    rejects = names_of_rejects(config) if is_claimed(config) and not dry_run else []
    try:
        data = load_data(
            config,
            base,
            tokenizer,
            packing=packing and base.model.packs,
            row_multiple=base.model.row_multiple,
            files=TokenFiles(
                cache_dir=directory / TOKENS_NAME,
                rejects_path=directory / REJECTS_NAME if rejects else None,
                rejects_shown_by=None if rejects else SHOWS_REJECTS,
                shared=resources.enter_context(shared_tokens(log, copies=not dry_run)),
            ),
            log=log,
        )
    finally:
        if rejects:
            note_rejects(config.output_dir, rejects)
    report_mixed_lengths(config, data, base.config, log.notice)
    return data


def report_mixed_lengths(
    config: RunConfig, data: TrainingData, model_config: PretrainedConfig, notice: Callable[[str], None]
) -> None:
    """Report rows that change the rotary frequencies of others: the longest row of a micro-batch decides for all."""
    rope = getattr(text_config(model_config), "rope_parameters", None) or {}
    boundaries = {"longrope": rope.get("original_max_position_embeddings"), "dynamic": num_positions(model_config)}
    lengths, boundary = data.cache.lengths, boundaries.get(str(rope.get("rope_type")))
    shares = data.is_packed or config.micro_batch_size != 1
    if shares and boundary and len(lengths) and lengths.min() <= boundary < lengths.max():
        notice(
            f"a row of more than {boundary} tokens changes the rotary frequencies of all rows in its micro-batch "
            f"(rope_type: {rope['rope_type']}), as in transformers; micro_batch_size: 1 with sample_packing: false "
            "keeps rows apart"
        )


def load_data(
    config: RunConfig,
    base: LanguageBase,
    tokenizer: Tokenizer,
    *,
    packing: bool,
    row_multiple: int = 1,
    files: TokenFiles,
    log: RunLog,
) -> TrainingData:
    """The config's data for a model, tokenised and packed. `log` shows how far reading is. Raises BadInput,
    EnvironmentFailure."""
    size, number = config.split or config.split_by(1).known_split
    return load_training_data(
        sources_of(config, config.datasets, base.labels),
        DataSettings(
            sequence_len=config.sequence_len,
            micro_batch_size=size,
            gradient_accumulation_steps=number,
            packing=packing,
            shuffle=config.shuffle,
            seed=config.seed,
            val_set_size=config.val_set_size,
            task=config.task,
            mlm_probability=config.mlm_probability,
            compares=config.compares,
            trains_prompts=config.rl == "orpo",
        ),
        Encoding(
            tokenizer=tokenizer,
            num_embeddings=base.model.spec.vocab_size,
            train_on_inputs=config.train_on_inputs if config.rl is None else False,
            excess_length_strategy=config.excess_length_strategy,
            stop_ids=read_stop_ids(config, base.directory, base.config, tokenizer),
        ),
        files,
        notice=log.notice,
        open_bar=bars_of(log),
        row_multiple=row_multiple,
        test_sources=sources_of(config, config.test_datasets, base.labels),
        stream_steps=config.max_steps if config.streaming else None,
    )


def shared_tokens(log: RunLog, *, copies: bool) -> SharedTokens:
    """The tokens that all commands share. `copies`: the command gets copies of those that it uses."""
    return SharedTokens(user_cache_directory() / TOKENS_NAME, copies=copies, notice=log.notice)


def sources_of(config: RunConfig, datasets: Sequence[DatasetConfig], labels: Sequence[str] = ()) -> list[DatasetSource]:
    """The datasets as they are read. `labels`: the model's own classes."""
    # TRL's trainers of these two end answers of messages with an EOS token, too.
    more = {"compares": config.compares, "closes_answers": config.rl in ("orpo", "simpo")}
    return [
        DatasetSource(**{**item.model_dump(), **more, "labels": item.labels or tuple(labels) or None})
        for item in datasets
    ]


def why_not_packed(model_type: str, attention: str) -> str:
    """What is reported if samples are to be packed and the model does not separate them.

    With flash attention, transformers (5.23) makes no mask. It finds the samples of a packed sequence by positions that
    begin again, but only in micro-batches of one row: in larger ones, samples would see each other.
    """
    if attention.startswith("flash"):
        return (
            f"{attention} cannot separate packed samples, so every sample gets a sequence of its own; "
            "attn_implementation: sdpa packs them"
        )
    return f"{model_type} cannot separate packed samples; every sample gets a sequence of its own"


def read_fitting_tokenizer(config: RunConfig, base: LanguageBase, log: RunLog) -> Tokenizer:
    """The tokenizer of the run. Those of its tokens that Ratel itself puts into rows have a row in the model's
    embedding. Raises BadInput."""
    rows = base.model.spec.vocab_size
    tokenizer = base.read_tokenizer().for_rows(rows, log.notice)
    if (most := num_ids(tokenizer)) > rows:
        log.notice(
            f"the tokenizer has ids 0 to {most - 1}, but the model's embedding has only {rows} rows: rows of data "
            "with a higher id are rejected"
        )
    for name in ("eos_token", "pad_token", *(("mask_token",) if config.task == "masked_lm" else ())):
        token = getattr(tokenizer, f"{name}_id")
        if token is not None and token >= rows:
            raise BadInput(
                f"the tokenizer's {name} {tokenizer.special_tokens_map.get(name)!r} has the id {token}, but the model's"
                f" embedding has only {rows} rows",
                f"name a token with a row, special_tokens: {{{name}: ...}}, or resize the model's embedding first",
            )
    padding = getattr(text_config(base.config), "pad_token_id", None)
    if config.task == "classification" and tokenizer.pad_token_id is None and padding is None:
        raise BadInput(
            "the tokenizer has no padding token, and no EOS token in its place, but a classifier needs padding",
            "name a token of its vocabulary, special_tokens: {pad_token: ...}",
        )
    return tokenizer


def check_positions(sequence_len: int, model: DecoderModel, model_config: PretrainedConfig, log: RunLog) -> None:
    """Raise BadInput if rows are longer than the model's table of positions; a model without a table gets a notice."""
    table = position_table(model, model_config)
    if table is not None and sequence_len > table[1]:
        raise BadInput(
            f"sequence_len is {sequence_len}, but {table[0]} has only {table[1]} positions",
            f"set sequence_len to {table[1]} or less",
        )
    trained = num_positions(model_config)
    if trained is not None and sequence_len > trained:
        log.notice(f"sequence_len is {sequence_len}; the model was trained with up to {trained} tokens")


def _check_row_length(sequence_len: int, model: DecoderModel, model_config: PretrainedConfig) -> None:
    """Raise BadInput if the longest rows are no multiple of the chunks that the model computes."""
    chunk = model.row_multiple
    if sequence_len % chunk:
        below, above = sequence_len // chunk * chunk, align_up(sequence_len, chunk)
        raise BadInput(
            f"sequence_len is {sequence_len}, but {model_config.model_type} computes rows in chunks of {chunk} tokens",
            f"set sequence_len to {f'{below} or ' if below else ''}{above}",
        )


def num_positions(model_config: PretrainedConfig) -> int | None:
    """The most tokens in a row that a model was trained with; None if its configuration does not say."""
    trained = getattr(text_config(model_config), "max_position_embeddings", None)
    return trained if isinstance(trained, int) else None


def position_table(model: DecoderModel, model_config: PretrainedConfig) -> tuple[str, int] | None:
    """The name of the model's table of positions, and how many it has; None if the model computes positions."""
    trained = num_positions(model_config)
    # A table of positions has a row for each position, and in some models a few more rows.
    for parameter in model.spec.embedding.parameters[1:]:
        if trained is not None and len(parameter.shape) == 2 and trained <= parameter.shape[0] <= trained + 8:
            module = model.skeleton.get_submodule(parameter.name.rpartition(".")[0])
            filling = getattr(module, "padding_idx", None)
            if filling is not None and not model.layer_runner.takes_positions:  # they begin behind it
                return parameter.name, min(trained, parameter.shape[0] - filling - 1)
            return parameter.name, trained
    return None


SHOWS_REJECTS = "`ratel data CONFIG --bad`"
