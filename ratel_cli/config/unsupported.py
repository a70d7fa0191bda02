"""What other trainers do and Ratel does not, with what to do instead: the answer to `ratel explain lora`.

Invariant: keys of a config are not here; config/foreign.py has them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """Something that other trainers do and Ratel does not, and what to do instead."""

    name: str
    words: str
    """What people call it, in lower case without hyphens, separated by blanks."""
    instead: str


UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported(
        name="Other adapters than LoRA and DoRA",
        words="adapters peft",
        instead="`adapter: lora` trains LoRA adapters by PEFT's modules, beside a model that may be larger than RAM,"
        " and is quantised with `load_in_4bit` (QLoRA). Merge an adapter into its base model to train on from it.",
    ),
    Unsupported(
        name="GRPO, PPO and other training on rewards",
        words="grpo ppo rlhf rloo reward rewards distillation",
        instead="`rl: dpo`, `ipo`, `orpo`, `simpo` and `kto` learn from answers that are compared. For a reward model,"
        " or answers that the model writes while it trains, use TRL.",
    ),
    Unsupported(
        name="Training of quantised weights",
        words="quantised quantized quantisation quantization 4bit 8bit int4 int8 fp8 bitsandbytes bnb gptq awq gguf",
        instead="What is trained is in `dtype`, with its master weights on NVMe. Beside an adapter the model can be"
        " quantised as bitsandbytes does it, with `load_in_4bit` or `load_in_8bit`, or stay as GPTQ and AWQ have it in"
        " 4 bit. Other formats of files are read as the numbers that they stand for.",
    ),
    Unsupported(
        name="Several GPUs or machines",
        words="multigpu gpus distributed ddp fsdp deepspeed sharding parallel parallelism accelerate multinode",
        instead="Ratel computes on one device and streams the model from NVMe instead of sharding it; `ratel plan` says"
        " how long a step takes.",
    ),
    Unsupported(
        name="Images, sound and video",
        words="vision image images audio video multimodal vlm",
        instead="Ratel trains on text. The language part of a larger model is trained, and its other parts are kept.",
    ),
)


def unsupported(word: str) -> Unsupported | None:
    """What is not supported that people call by this word; None if there is nothing."""
    plain = "".join(char for char in word.lower() if char.isalnum())
    return next((each for each in UNSUPPORTED if plain in each.words.split()), None)


def instead_of(word: str) -> str:
    """What to do instead of something that people call by this word."""
    found = unsupported(word)
    assert found is not None
    return found.instead
