"""Keys of the config that belong together, by their relations where these say it."""

from __future__ import annotations

from typing import Final

from ratel_cli.config.keys.relation import keys_ignored
from ratel_cli.config.keys.schema import RunConfig

OF_RATES: Final = ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale")
"""What learns at another rate than the rest."""
OF_ADAPTER: Final = tuple(key for key in keys_ignored(RunConfig, "only_if", "adapter") if key not in OF_RATES)
"""What an adapter is, if there is one."""
OF_PREFERENCES: Final = keys_ignored(RunConfig, "only_if", "rl")
"""How answers are compared, if they are."""
OF_WARMUP: Final = keys_ignored(RunConfig, "ignored_with", "warmup_steps")
"""How a share of all steps becomes a warm-up."""
OF_QUANTISATION: Final = ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "quantize_moe_experts")
"""How the model beside an adapter is quantised, if it is."""
OF_VOCABULARY: Final = (
    "tokens", "new_special_tokens", "added_tokens_overrides", "new_tokens_init", "pad_vocab_to_multiple_of",
)  # fmt: skip
"""What the vocabulary gets besides the base model's."""
