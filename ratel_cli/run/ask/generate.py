"""`ratel generate`: texts that a model adds to prompts, with one block of the model in memory at a time.

    1. the prompts become token ids, as in training
    2. they are put into batches: as many prompts as fit with their keys and values, which stay in memory
    3. transformers' own `generate` runs on the skeleton. Each token of a batch is one pass over the blocks; blocks that
       fit into what is left of memory are read once

Invariant: the tokens are those that the model's own `generate` gives in memory, for the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from time import perf_counter

import torch
from transformers import GenerationConfig, PretrainedConfig

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.console import RunLog
from ratel_cli.data.text.prompts import Prompt, encode_prompts
from ratel_cli.data.text.tokenise import without_row
from ratel_cli.data.text.tokenizer import Tokenizer
from ratel_cli.errors import BadInput, first_line
from ratel_cli.hardware.gpu import compute_device, determinism
from ratel_cli.model.cut.decoder import DecoderModel
from ratel_cli.model.export.sidecars import GENERATION_NAME, generation_defaults
from ratel_cli.model.files.kind import text_config
from ratel_cli.report.words.completions import Completion, Completions
from ratel_cli.run.ask.streamed import completed, open_streamed
from ratel_cli.run.ask.whole_model import computing_whole
from ratel_cli.run.context import RunContext, open_context
from ratel_cli.run.inputs.language_base import LanguageBase
from ratel_cli.run.inputs.named_model import NamedModel
from ratel_cli.run.inputs.process import prepare_process
from ratel_cli.run.inputs.streamed_blocks import (
    BlockMemory,
    StreamedModel,
    fit_blocks,
    largest_batch,
    layer_bytes,
    open_reader,
    resident_blocks,
)
from ratel_cli.run.inputs.text_data import num_positions, position_table, read_fitting_tokenizer
from ratel_cli.run.inputs.tokenizer import special_tokens_of
from ratel_cli.units import counted

_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "repetition_penalty", "no_repeat_ngram_size",
         "bad_words_ids", "suppress_tokens", "begin_suppress_tokens")  # fmt: skip
"""Names of the model's own generation settings that are used."""
_KEPT_FOR_SAMPLING = ("top_k", "top_p", "min_p")
_LOGITS_COPIES = 4
"""The scores in fp32, and what processors and sampling make of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What to generate, and how."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    temperature: float
    """0: always the likeliest token."""
    raw: bool
    """Continue texts as they are, without the chat template."""
    step: int | None
    """A saved step of the run; None: the last one."""


def generate(named: NamedModel, request: GenerationRequest, log: RunLog) -> Completions:
    """The completions of all prompts. Raises RatelError."""
    prepare_process()
    config = completed(named)
    device = compute_device(config.device)
    with (
        determinism(config.deterministic, device, notice=log.notice),
        open_context(config, log, device=device) as context,
    ):
        streamed = open_streamed(context, named, request.step)
        base = streamed.base
        if base.model.task != "causal_lm":
            name = base.model.spec.architecture
            if base.model.task == "seq2seq":
                reason = (
                    "`ratel generate` is for decoders alone; load the export with transformers, and call its generate"
                )
                raise BadInput(f"{name} is an encoder-decoder: {reason}")
            raise BadInput(f"{name} generates no text: it does not predict the next token")
        tokenizer = read_fitting_tokenizer(config, base, log)
        settings = _settings(config, base, tokenizer, request, is_of_run=named.given is None)
        ids = encode_prompts(tokenizer, request.prompts, raw=request.raw, notice=log.notice)
        for number, each in enumerate(ids, start=1):
            if max(each) >= base.model.spec.vocab_size:
                raise BadInput(f"prompt {number}: {without_row(tokenizer, max(each), base.model.spec.vocab_size)}")
        _check_lengths(ids, request, base, log)
        context.listen()
        return _generate(context, streamed, tokenizer, ids, request, settings)


def _generate(
    context: RunContext,
    streamed: StreamedModel[LanguageBase],
    tokenizer: Tokenizer,
    ids: Sequence[list[int]],
    request: GenerationRequest,
    settings: GenerationConfig,
) -> Completions:
    batch_size, memory = _fit(context, streamed, ids, request.max_new_tokens)
    resident = resident_blocks(streamed, memory)
    batches = [ids[first : first + batch_size] for first in range(0, len(ids), batch_size)]
    found: list[list[int]] = []
    num_passes, start = 0, perf_counter()
    torch.manual_seed(context.config.seed)
    reader = open_reader(context, streamed, memory, resident=resident)
    with reader.device.translate_errors(), context.bar("generating", len(batches) * request.max_new_tokens) as advance:

        def after_pass() -> None:
            nonlocal num_passes
            num_passes += 1
            advance(1)

        with computing_whole(streamed.base.model, reader, after_pass=after_pass) as skeleton:
            for batch in batches:
                width = max(map(len, batch))  # padded on the left, as transformers expects it
                input_ids = torch.tensor([[settings.pad_token_id] * (width - len(each)) + each for each in batch])
                mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in batch])
                made = skeleton.generate(  # type: ignore[operator]
                    input_ids.to(context.device), attention_mask=mask.to(context.device), generation_config=settings
                )
                found.extend(_until_end(row, settings) for row in made[:, input_ids.shape[1] :].tolist())
    return Completions(
        model=streamed.name,
        completions=tuple(
            Completion(
                prompt=prompt,
                text=tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False),
                num_prompt_tokens=len(each),
                token_ids=tuple(new),
            )
            for prompt, each, new in zip(request.prompts, ids, found, strict=True)
        ),
        batch_size=min(batch_size, len(ids)),
        num_passes=num_passes,
        num_resident_blocks=len(resident),
        seconds=perf_counter() - start,
        bytes_read=reader.bytes_read,
    )


def _check_lengths(ids: Sequence[list[int]], request: GenerationRequest, base: LanguageBase, log: RunLog) -> None:
    """Raise BadInput if a text gets longer than the model's table of positions; without a table there is a notice."""
    table, trained = position_table(base.model, base.config), num_positions(base.config)
    longest = max(range(len(ids)), key=lambda number: len(ids[number]))
    length = len(ids[longest]) + request.max_new_tokens
    what = (
        f"prompt {longest + 1} has {counted(len(ids[longest]), 'token')} and gets up to {request.max_new_tokens} more"
    )
    if table is not None and length > table[1]:
        raise BadInput(
            f"{what}, but {table[0]} has only {table[1]} positions", "shorten the prompt, or lower --max-new-tokens"
        )
    if trained is not None and length > trained:
        log.notice(f"{what}; the model was trained with up to {trained} tokens")


def _settings(
    config: RunConfig, base: LanguageBase, tokenizer: Tokenizer, request: GenerationRequest, *, is_of_run: bool
) -> GenerationConfig:
    """How transformers generates: by the model's own settings, but greedily unless a temperature is asked for.

    `is_of_run`: with the special tokens that the run's export has.
    """
    values = generation_defaults(base.directory)
    if is_of_run:
        tokens = special_tokens_of(config, tokenizer)
        values |= tokens.aligned(text_config(base.config).to_dict(), values)[1]
    try:
        own = GenerationConfig.from_dict(values)
    except Exception as error:
        raise BadInput(f"{base.directory / GENERATION_NAME}: cannot be used: {first_line(error)}") from error
    names = _KEPT + (_KEPT_FOR_SAMPLING if request.temperature else ())
    kept = {name: value for name in names if (value := getattr(own, name, None)) is not None}
    kept.setdefault("eos_token_id", tokenizer.eos_token_id)
    if kept.get("pad_token_id") is None:
        candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        kept["pad_token_id"] = next(each for each in candidates if each is not None)
    sampling = {"do_sample": True, "temperature": request.temperature} if request.temperature else {"do_sample": False}
    return GenerationConfig(max_new_tokens=request.max_new_tokens, use_cache=True, **kept, **sampling)


def _until_end(row: list[int], settings: GenerationConfig) -> list[int]:
    """The new tokens of one prompt, without the padding behind the token that ends them."""
    ends = settings.eos_token_id
    for place, token in enumerate(row):
        if token in (ends if isinstance(ends, list) else [ends]):
            return row[: place + 1]
    return row


def _fit(
    context: RunContext, streamed: StreamedModel[LanguageBase], ids: Sequence[list[int]], max_new_tokens: int
) -> tuple[int, BlockMemory]:
    """The largest batch that fits, and the memory that is left. Raises DoesNotFit if a single prompt does not."""
    width = max(map(len, ids))
    layers = {size: layer_bytes(streamed.base.model, batch_size=size, num_tokens=width) for size in (1, 2)}

    def fit(size: int) -> BlockMemory:
        working = layers[1] + (size - 1) * (layers[2] - layers[1])
        return fit_blocks(
            context,
            streamed,
            working_bytes=working + size * _prompt_bytes(streamed, width),
            least_bytes=size * (width + max_new_tokens) * cache_bytes(streamed.base.model, streamed.base.config),
            what=f"generating for {counted(size, 'prompt')}",
            hint=", or lower --max-new-tokens",
        )

    return largest_batch(len(ids), fit)


def _prompt_bytes(streamed: StreamedModel[LanguageBase], width: int) -> int:
    """What one prompt of a batch takes besides a layer's activations: hidden states, masks and logits."""
    spec, itemsize = streamed.spec, streamed.spec.dtype_bytes
    keeps_last = streamed.base.model.skeleton._supports_logits_to_keep()  # type: ignore[operator]
    logits_elements = spec.vocab_size * (1 if keeps_last else width)
    hidden_bytes = width * (3 * spec.hidden_size * itemsize + spec.carried_bytes)
    return hidden_bytes + 2 * width**2 * itemsize + logits_elements * itemsize + _LOGITS_COPIES * 4 * spec.vocab_size


def cache_bytes(model: DecoderModel, config: PretrainedConfig) -> int:
    """Keys and values of one token in all layers, and twice those of a layer, which is copied as it grows."""
    text = config.get_text_config()
    latent = sum(_number(text, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    heads = _number(text, "num_key_value_heads") or model.traits.num_heads or 1
    width = model.traits.num_heads * latent if latent else 2 * heads * (model.traits.head_dim or model.spec.hidden_size)
    return (model.spec.num_layers + 2) * width * model.spec.dtype_bytes


def _number(config: PretrainedConfig, name: str) -> int:
    """A size that models of this kind read; 0 if they do not, whatever config.json says."""
    value = getattr(config, name, None) if name in {field.name for field in fields(config)} else None
    return value if isinstance(value, int) else 0
