"""Vocabularies of mistral-common: those that the package ships, and newer and smaller ones that are made of them.

The package ships none of versions 11 and 13. These differ from the last one that it ships in their control tokens.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import mistral_common

DATA = Path(mistral_common.__file__).with_name("data")
SHIPPED = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v3 tekken": "tekken_240911.json",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}
MADE = ("v11", "v13")
_MOST_TOKENS = 8192  # of those that are made: the package's have 131,072, and take a second to load
CONTROL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip


@cache
def _tekken() -> dict[str, Any]:
    written = json.loads((DATA / SHIPPED["v3 tekken"]).read_text(encoding="utf-8"))
    return {"vocab": written["vocab"][:_MOST_TOKENS], "config": written["config"]}


def save_vocabulary(directory: Path, version: str, *, num_tokens: int | None = None) -> Path:
    """Save a vocabulary of this version under the name that a model has it by: the package's own, or the first
    `num_tokens` tokens of one that is made."""
    directory.mkdir(parents=True, exist_ok=True)
    if version in SHIPPED and num_tokens is None:
        source = DATA / SHIPPED[version]
        path = directory / ("tekken.json" if source.suffix == ".json" else f"tokenizer.model.{version}")
        shutil.copyfile(source, path)
        return path
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(CONTROL_TOKENS)]
    num_tokens = num_tokens or _MOST_TOKENS
    sizes = {"default_num_special_tokens": len(special), "default_vocab_size": num_tokens}
    written = {
        "config": {**_tekken()["config"], "version": version, **sizes},
        "special_tokens": special,
        "vocab": _tekken()["vocab"][: num_tokens - len(special)],
    }
    path = directory / "tekken.json"
    path.write_text(json.dumps(written), encoding="utf-8")
    return path
