"""What a loop of one's own trains, as one axis of its tests: all weights, or an adapter."""

from __future__ import annotations

from collections.abc import Mapping

KEYS: dict[str, object] = {"lora_r": 4, "lora_alpha": 8}
IN_PEFT: dict[str, object] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
"""The same in PEFT's words."""
ADAPTERS: dict[str, Mapping[str, object] | None] = {
    "all weights": None,
    "lora": KEYS,
    "qlora": {**KEYS, "load_in_4bit": True},
}
"""By name: the argument of `ratel.open`."""
