"""Keys of the config that belong together."""

from __future__ import annotations

from typing import Final

OF_PREFERENCES: Final = (
    "rl_beta", "simpo_gamma", "cpo_alpha", "kto_desirable_weight", "kto_undesirable_weight", "disable_dropout",
)  # fmt: skip
"""How answers are compared, if they are."""
OF_ADAPTER: Final = (
    "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear", "lora_target_parameters",
    "lora_layers_to_transform", "peft_use_rslora", "peft_use_dora", "lora_modules_to_save",
    "peft_ensure_weight_tying", "peft_init_lora_weights",
)  # fmt: skip
"""What an adapter is, if there is one."""
OF_RATES: Final = ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale")
"""What learns at another rate than the rest."""
OF_WARMUP: Final = ("warmup_rounding", "max_warmup_steps")
"""How a share of all steps becomes a warm-up."""
OF_QUANTISATION: Final = ("load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant", "quantize_moe_experts")
"""How the model beside an adapter is quantised, if it is."""
OF_VOCABULARY: Final = (
    "tokens", "new_special_tokens", "added_tokens_overrides", "new_tokens_init", "pad_vocab_to_multiple_of",
)  # fmt: skip
"""What the vocabulary gets besides the base model's."""
