"""Sidecars: the files next to the weights, that is configuration, tokenizer, chat template, generation defaults, card.

An export copies them from the base model, so that nothing that its author wrote is lost. Only the configuration
changes, where it would be wrong for the new weights. Invariant: sidecars are never code and never weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import GenerationConfig

from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.directory import trusted_file
from ratel_cli.model.skeleton import read_model_config
from ratel_cli.model.spec import ModelSpec
from ratel_cli.model.staging import Staging
from ratel_cli.sizes import DtypeName
from ratel_cli.units import format_count

_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "*.tiktoken", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
    "LICENSE*", "NOTICE*",
)  # fmt: skip
_GENERATION_NAME = "generation_config.json"


def add_sidecars(
    staging: Staging, *, base_dir: Path, spec: ModelSpec, dtype: DtypeName, base_model: str | None, num_updates: int
) -> None:
    """Put all sidecars into `staging`. `base_model` is the hub id, or None.

    Raises BadInput if a file of the base model cannot be used, EnvironmentFailure if one cannot be written.
    """
    staging.write_text("config.json", _config(base_dir, spec, dtype))
    staging.write_text("README.md", _card(spec, dtype, base_model, num_updates))
    for pattern in _COPIED:
        for path in sorted(base_dir.glob(pattern)):
            if not path.is_dir():
                name = str(path.relative_to(base_dir))
                staging.copy(trusted_file(base_dir, name), name)
    if (base_dir / _GENERATION_NAME).exists():
        staging.copy(trusted_file(base_dir, _GENERATION_NAME), _GENERATION_NAME)
    else:
        defaults = GenerationConfig.from_model_config(read_model_config(base_dir))
        staging.write_text(_GENERATION_NAME, defaults.to_json_string())


def _config(base_dir: Path, spec: ModelSpec, dtype: DtypeName) -> str:
    """The base model's configuration with the new dtype and without references to code."""
    path = trusted_file(base_dir, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadInput(f"{path}: not valid JSON: {excerpt(str(error))}") from error
    if not isinstance(config, dict):
        raise BadInput(f"{path}: not a JSON object")
    for name in ("torch_dtype", "auto_map"):
        config.pop(name, None)
    config["architectures"] = [spec.architecture]
    config["dtype"] = dtype
    return json.dumps(config, indent=2) + "\n"


def _card(spec: ModelSpec, dtype: DtypeName, base_model: str | None, num_updates: int) -> str:
    """A model card with what is known here. The model's author adds the rest."""
    base_line = f"base_model: {base_model}\n" if base_model else ""
    origin = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "its base model"
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{base_line}tags:\n- ratel\n---\n\n"
        f"# {Path(spec.name).name}\n\n"
        f"{spec.architecture} with {format_count(spec.num_parameters)} parameters in {dtype},"
        f" fine-tuned from {origin} with Ratel: all parameters, {num_updates} optimizer updates.\n\n"
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n'
        "```\n"
    )
