"""The tokenizer of a run: the base model's, with the chat template and the special tokens that the config names.

A classifier finds the end of a row by its padding, so that of a run with classes has a padding token.

Invariant: what a run tokenises with is what its export contains (`tokenizer_files`).
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from transformers import AddedToken, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.data.text.mistral_tokenizer import MistralTokenizer, mistral_file
from ratel_cli.data.text.tokenizer import NoTokenizer, Tokenizer, has_chat_template
from ratel_cli.errors import BadInput, first_line
from ratel_cli.model.export.sidecars import (
    GENERATION_NAME,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    VOCABULARY_FILES,
    TokenizerFiles,
)
from ratel_cli.model.files.directory import read_json_object, trusted_file
from ratel_cli.model.files.kind import text_config
from ratel_cli.model.values.special_tokens import SpecialTokens
from ratel_cli.run.files.run_directory import run_directory
from ratel_cli.training.facts import read_facts

TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{{ message['content'] + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] }}"
        "{{ '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
    ),
}
"""The chat templates that Ratel knows by name, as axolotl has them. Their marks are special tokens."""

_MARKS = {"chatml": ("<|im_start|>", "<|im_end|>"), "llama3": ("<|start_header_id|>", "<|eot_id|>")}
_OWN, _FALLBACK = "tokenizer_default", "tokenizer_default_fallback_"
_MAP_FILE = "special_tokens_map.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTokenizer:
    """The tokenizer of a run, as it was read."""

    tokenizer: Tokenizer
    special: Mapping[str, str] = field(default_factory=dict)
    """The special tokens that are not those of the files."""
    template: str | None = None
    """The chat template that is not that of the files."""
    notices: tuple[str, ...] = ()
    """What is worth knowing about it."""

    def for_rows(self, num_embeddings: int, notice: Callable[[str], None]) -> Tokenizer:
        """Return the tokenizer for a model whose embedding has this many rows, with all notices about it."""
        for each in self.notices:
            notice(each)
        if isinstance(self.tokenizer, NoTokenizer):
            self.tokenizer.num_tokens = num_embeddings
        return self.tokenizer


def without_tokenizer_keys(config: RunConfig) -> RunConfig:
    """The config for the tokenizer of its own export, whose files have what these keys add."""
    keys = (
        "special_tokens", "chat_template", "chat_template_jinja", "tokens", "new_special_tokens",
        "added_tokens_overrides",
    )  # fmt: skip
    return config.model_copy(update={key: RunConfig.model_fields[key].default for key in keys})


def read_tokenizer(config: RunConfig, base_dir: Path, model_config: PretrainedConfig) -> RunTokenizer:
    """Read the tokenizer of a run. Without tokenizer files it is one that only token ids do not need.

    Raises BadInput if the files, the chat template or the special tokens cannot be used.
    """
    if config.tokenizer_use_mistral_common:
        return RunTokenizer(tokenizer=_mistral_tokenizer(base_dir))
    if not any(next(base_dir.glob(pattern), None) for pattern in VOCABULARY_FILES):
        if config.chat_template or config.chat_template_jinja or config.special_tokens or config.can_grow:
            raise BadInput(f"{base_dir}: no usable tokenizer: there are no tokenizer files")
        return RunTokenizer(tokenizer=NoTokenizer(f"{base_dir} has no tokenizer files"))
    found = _loaded(base_dir, model_config)
    if config.added_tokens_overrides:
        with tempfile.TemporaryDirectory() as directory:
            found.save_pretrained(directory)
            _rename_tokens(Path(directory), config.added_tokens_overrides)
            found = _loaded(Path(directory), model_config)
    _add_tokens(found, config)
    tokenizer, known = cast(Tokenizer, found), found.get_vocab()
    notices = list[str]()
    special = _special_tokens(config, tokenizer, known, notices.append)
    if special:  # as if the files named them: what is one of them is found in texts before anything else
        found.add_special_tokens({**special})
    template = _template(config, has_own=has_chat_template(tokenizer), notice=notices.append)
    if template is not None:
        tokenizer.chat_template = template
        for mark in _MARKS.get(config.chat_template or "", ()):
            if mark not in known:
                words = f"the tokenizer has no token {mark}; it becomes several"
                notices.append(f"chat_template: {config.chat_template}: {words}")
    return RunTokenizer(tokenizer=tokenizer, special=special, template=template, notices=tuple(notices))


def _loaded(directory: Path, model_config: PretrainedConfig) -> PreTrainedTokenizerBase:
    try:
        # Whether mistral-common is installed must not change the tokens.
        found = AutoTokenizer.from_pretrained(
            directory, config=model_config, trust_remote_code=False, mistral_format=False
        )
    except Exception as error:
        raise BadInput(f"{directory}: no usable tokenizer: {first_line(error)}") from error
    return cast(PreTrainedTokenizerBase, found)


def _rename_tokens(directory: Path, names: Mapping[int, str]) -> None:
    """Give tokens of the files in `directory` other names, all at once: two may change places. Raises BadInput if one
    is none beside the vocabulary, or if its new name is another token's."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise BadInput("added_tokens_overrides: the tokenizer has no tokenizer.json", "use a fast tokenizer")
    content = json.loads(path.read_text(encoding="utf-8"))
    before = {each["id"]: each["content"] for each in content["added_tokens"]}
    if unknown := sorted(names.keys() - before.keys()):
        known = f"{min(before)} to {max(before)}" if before else "none"
        raise BadInput(f"added_tokens_overrides: {unknown[0]} is no token beside the vocabulary", f"those are: {known}")
    renamed = {before[number]: name for number, name in names.items()}
    vocabulary = content["model"].get("vocab")
    others = {*before.values(), *(vocabulary if isinstance(vocabulary, dict) else ())} - renamed.keys()
    for name, number in Counter(names.values()).items():
        if number > 1 or name in others:
            raise BadInput(f"added_tokens_overrides: {name!r} would be the name of two tokens", "choose another name")
    for each in (path, directory / TOKENIZER_CONFIG_NAME, directory / _MAP_FILE):
        if each.exists():
            found = _with_names(json.loads(each.read_text(encoding="utf-8")), renamed)
            each.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")


def _with_names(content: object, renamed: Mapping[str, str]) -> object:
    """A part of a JSON file with other names for tokens, keys among them."""
    if isinstance(content, dict):
        return {renamed.get(key, key): _with_names(value, renamed) for key, value in content.items()}
    if isinstance(content, list):
        return [_with_names(each, renamed) for each in content]
    return renamed.get(content, content) if isinstance(content, str) else content


def _add_tokens(tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> None:
    """Add the config's tokens as axolotl does: first those of `special_tokens`, which are found as they are written."""
    first = [each for each in (config.special_tokens or {}).values() if each in config.tokens]
    others = [each for each in config.tokens if each not in first]
    for tokens, are_special in ((first, True), (others, False), (config.new_special_tokens, True)):
        new = [AddedToken(each, lstrip=False, rstrip=False, normalized=False, special=are_special) for each in tokens]
        tokenizer.add_tokens(new, special_tokens=are_special)


def read_stop_ids(
    config: RunConfig, base_dir: Path, model_config: PretrainedConfig, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """The tokens with which the model stops: those of `eos_token_id` in both files of it, EOS and `eot_tokens`.

    Raises BadInput if a token of the config is not in the vocabulary, or a file cannot be used.
    """
    known = tokenizer.get_vocab() if config.eot_tokens else {}
    for token in config.eot_tokens:
        if token not in known:
            raise BadInput(
                f"eot_tokens: the tokenizer has no token {token!r}",
                hint=f"name tokens that the tokenizer has, or add it: `tokens: [{token!r}]`",
            )
    has_own = (base_dir / GENERATION_NAME).exists()
    listed = read_json_object(base_dir, GENERATION_NAME).get("eos_token_id") if has_own else None
    configs = model_config, text_config(model_config)
    of_model = (listed, *(getattr(each, "eos_token_id", None) for each in configs))  # that of Qwen3-VL's text has none
    ids = [each for ends in of_model for each in (ends if isinstance(ends, list) else [ends])]
    ids += [tokenizer.eos_token_id, *(known[token] for token in config.eot_tokens)]
    return tuple(sorted({each for each in ids if isinstance(each, int)}))


def _mistral_tokenizer(base_dir: Path) -> MistralTokenizer:
    """The tokenizer of mistral-common. Raises BadInput."""
    name = mistral_file([path.name for path in base_dir.iterdir()])
    if name is None:
        raise BadInput(
            f"{base_dir}: no tokenizer for mistral-common: there is neither tekken.json nor tokenizer.model",
            "remove tokenizer_use_mistral_common, so that transformers reads the tokenizer",
        )
    return MistralTokenizer(trusted_file(base_dir, name))


def _special_tokens(
    config: RunConfig, tokenizer: Tokenizer, known: Mapping[str, int], notice: Callable[[str], None]
) -> dict[str, str]:
    """The special tokens of the config that are in the vocabulary `known`; for classes also one for padding, which the
    tokenizer may lack. Raises BadInput.

    Texts depend on BOS and EOS, so these must be there. Padding and the like have no loss.
    """
    special: dict[str, str] = {}
    for name, token in (config.special_tokens or {}).items():
        if token in known:
            special[name] = token
        elif name in ("bos_token", "eos_token"):
            raise BadInput(
                f"special_tokens: the tokenizer has no token {token!r}, for {name}",
                hint=f"name a token that the tokenizer has, or add it: `tokens: [{token!r}]`",
            )
        else:
            notice(
                f"special_tokens: {name} is ignored: the tokenizer has no token {token!r}, and no loss depends on it; "
                f"`tokens: [{token!r}]` would add it"
            )
    end = special.get("eos_token", tokenizer.special_tokens_map.get("eos_token"))
    if config.task == "classification" and tokenizer.pad_token_id is None and "pad_token" not in special and end:
        special["pad_token"] = str(end)
        notice(
            f"the tokenizer has no padding token; its EOS token {str(end)!r} takes its place, in the export too; "
            "special_tokens can name another"
        )
    return special


def tokenizer_files(config: RunConfig, base_dir: Path, read: RunTokenizer) -> TokenizerFiles:
    """What an export has of the run's tokenizer, which was `read` and has not been used: it may save what it was last
    called with. Raises BadInput.

    No file is changed unless the config names a chat template or special tokens, or a classifier needs padding.
    """
    tokenizer, template = read.tokenizer, read.template
    is_other = config.tokens or config.new_special_tokens or config.added_tokens_overrides
    changed: dict[str, str] = _saved(tokenizer) if is_other else {}
    configs = {
        name: json.loads(changed[name])
        if name in changed
        else read_json_object(base_dir, name)
        if (base_dir / name).exists()
        else {}
        for name in (TOKENIZER_CONFIG_NAME, _MAP_FILE)
    }
    if template is not None:
        changed[TEMPLATE_NAME] = template
    for name, values in configs.items():
        new = {**values, **read.special}
        if template is not None:
            new.pop("chat_template", None)
        if new != values and (values or name == TOKENIZER_CONFIG_NAME):
            changed[name] = json.dumps(new, indent=2, ensure_ascii=False) + "\n"
    return TokenizerFiles(
        texts=changed,
        names=tuple(tokenizer.vocab_files_names.values()),
        special_tokens=special_tokens_of(config, tokenizer),
    )


def _saved(tokenizer: Tokenizer) -> dict[str, str]:
    """The text files of a tokenizer with new tokens, by name, as transformers saves them."""
    with tempfile.TemporaryDirectory() as directory:
        cast(PreTrainedTokenizerBase, tokenizer).save_pretrained(directory)
        paths = [path for path in sorted(Path(directory).iterdir()) if path.suffix in (".json", ".jinja", ".txt")]
        return {path.name: path.read_text(encoding="utf-8") for path in paths}


def special_tokens_of(config: RunConfig, tokenizer: Tokenizer) -> SpecialTokens:
    """What the configurations of a model name that a run trains with this tokenizer."""
    known = tokenizer.get_vocab() if config.eot_tokens else {}
    facts = read_facts(run_directory(config.output_dir))
    taught = () if facts is None else facts.end_ids
    return SpecialTokens(
        eos=tokenizer.eos_token_id,
        bos=tokenizer.bos_token_id,
        pad=tokenizer.pad_token_id,
        other_ends=(*(known[token] for token in config.eot_tokens if token in known), *taught),
    )


def _template(config: RunConfig, *, has_own: bool, notice: Callable[[str], None]) -> str | None:
    """The chat template that the config names; None: the tokenizer's own. Raises BadInput."""
    if config.chat_template_jinja is not None:
        return _read_jinja(config.chat_template_jinja)
    name = config.chat_template
    if name is None or name == _OWN or (name.startswith(_FALLBACK) and has_own):
        return None
    name = name.removeprefix(_FALLBACK)
    if name in TEMPLATES:
        return TEMPLATES[name]
    if not has_own:
        raise BadInput(
            f"chat_template: Ratel has no template named {name}, and the tokenizer has none of its own",
            hint=f"write chat_template: {' or '.join(TEMPLATES)}, or name a file with chat_template_jinja",
        )
    notice(f"chat_template: Ratel has no template named {name}; using the tokenizer's own")
    return None


def _read_jinja(written: str) -> str:
    """The template itself, or the text of the file that is named. Raises BadInput."""
    if "{{" in written or "{%" in written:
        return written
    try:
        return Path(written).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInput(f"chat_template_jinja: {written}: cannot be read: {first_line(error)}") from error
