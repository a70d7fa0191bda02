"""What the configs of `ported_configs` train, by what their tools document: the oracle for `ratel import`.

Written by hand from each config and the documented defaults of its tool; nothing of Ratel was asked. The words are
those of Ratel's config. `warmup` is steps and share, `step` is sequences at once and how many times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Set:
    """A data set."""

    path: str
    type: str
    split: str = "train"
    name: str | None = None
    field: str = "text"
    field_messages: str = "messages"
    max_samples: int | None = None
    roles_to_train: tuple[str, ...] | None = None
    train_on_eos: str | None = None
    message_property_mappings: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter."""

    rank: int
    alpha: int
    dropout: float = 0.0
    modules: tuple[str, ...] = ()
    """None of them: all linear ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a config trains. The defaults here are those of PyTorch's AdamW and of transformers' Trainer."""

    sets: Sequence[Set]
    learning_rate: float
    schedule: str
    least_rate: float | None = None
    """Of the schedule `cosine_with_min_lr`: the last rate as a share of the first."""
    warmup: tuple[float, float]
    epochs: float
    max_steps: int | None = None
    step: tuple[int, int]
    length: int
    packing: bool
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    decay: float = 0.0
    clip: float | None = 1.0
    trains_on_inputs: bool | str = False
    dtype: str = "bfloat16"
    streaming: bool = False
    held_out: float = 0
    chat_template: str | None = None
    adapter: Adapter | None = None
    unknown: frozenset[str] = frozenset()
    """Keys about which the user must decide because Ratel has none like them."""


def chat(path: str, **more: object) -> Set:
    """axolotl's `chat_template`: the words of the assistant have loss, and the EOS token behind them."""
    return Set(path=path, type="chat_template", roles_to_train=("assistant",), train_on_eos="turn", **more)  # type: ignore[arg-type]


FROM_VALUE = {"role": "from", "content": "value"}
FINE_TOME = chat(
    "mlabonne/FineTome-100k",
    split="train[:20%]",
    field_messages="conversations",
    message_property_mappings=FROM_VALUE,
)
ALPACA = Set(path="tatsu-lab/alpaca", type="alpaca")
ALPACA_2K = Set(path="mhenrichsen/alpaca_2k_test", type="alpaca")


def axolotl(rate: float, *sets: Set, **more: object) -> Meaning:
    """Its defaults: one epoch, `cosine`, no weight decay, `sample_packing: false`. All of its examples pack but one."""
    given: dict[str, object] = {"epochs": 1, "schedule": "cosine", "packing": True, "step": (1, 1), **more}
    return Meaning(sets=sets, learning_rate=rate, **given)  # type: ignore[arg-type]


AXOLOTL: Mapping[str, Meaning] = {
    "llama-3/fft-8b": axolotl(2e-5, ALPACA, step=(1, 8), warmup=(100, 0), length=8192, held_out=0.05),
    "llama-3/fft-8b-liger-fsdp": axolotl(
        2e-5, FINE_TOME, step=(2, 4), warmup=(100, 0), length=4096, held_out=0.02, chat_template="llama3"
    ),
    "archived/mpt-7b": axolotl(
        2e-7, ALPACA, epochs=4, warmup=(0, 0.1), length=2048, packing=False, decay=1e-4, held_out=0.02
    ),
    "compare-adamw-pretrain": axolotl(
        2e-4,
        Set(path="allenai/c4", type="completion", name="en"),
        step=(4, 1),
        max_steps=305,
        warmup=(10, 0),
        length=2048,
        decay=0.01,
        trains_on_inputs=True,
        streaming=True,
    ),
    "LiquidAI/lfm2-350m-fft": axolotl(5e-5, FINE_TOME, step=(4, 2), warmup=(0, 0.1), length=4096, held_out=0.05),
    "alst/llama3-8b-deepspeed-alst": axolotl(
        2e-5,
        Set(path="togethercomputer/Long-Data-Collections", type="completion"),
        Set(path="princeton-nlp/TextbookChapters", type="completion", field="chapter"),
        warmup=(100, 0),
        length=500_000,
    ),
    "glm45/glm4.5-fft-fsdp2": axolotl(2e-4, chat("winglian/pirate-ultrachat-10k"), warmup=(0, 0.1), length=2048),
    "phi/phi3-ft": axolotl(
        3e-6,
        Set(path="aaditya/alpaca_subset_1", type="alpaca"),
        step=(12, 2),
        epochs=2,
        warmup=(100, 0),
        length=4000,
        betas=(0.9, 0.95),
        epsilon=1e-5,
        decay=0.1,
    ),
    "tiny-llama/pretrain": axolotl(
        2e-4,
        Set(path="c4", type="completion", name="en"),
        step=(2, 4),
        epochs=4,
        max_steps=200,
        warmup=(10, 0),
        length=2048,
        streaming=True,
    ),
    "streaming/sft": axolotl(2e-4, ALPACA, step=(1, 4), max_steps=1000, warmup=(0, 0.1), length=1024, streaming=True),
    "distributed-parallel/qwen3-8b-fsdp-tp-cp": axolotl(
        2e-6, ALPACA, epochs=2, schedule="constant", warmup=(0, 0.1), length=8192
    ),
    "eurollm/tower-wmt24": axolotl(
        7e-6,
        chat("Unbabel/Tower-v1-2106"),
        step=(8, 4),
        epochs=2,
        warmup=(125, 0),
        length=4096,
        decay=0.01,
        chat_template="chatml",
    ),
    "llama-2/fft_optimized": axolotl(2e-4, ALPACA_2K, warmup=(100, 0), length=4096, decay=0.1, held_out=0.05),
    "gpt-oss/gpt-oss-20b-fft-fsdp2": axolotl(
        2e-5,
        chat("HuggingFaceH4/Multilingual-Thinking"),
        step=(1, 2),
        schedule="constant",
        warmup=(0, 0.03),
        length=4096,
    ),
    "llama-3/3b-fp8-fsdp2": axolotl(
        2e-5,
        Set(path="yahma/alpaca-cleaned", type="alpaca"),
        step=(16, 1),
        schedule="cosine_with_min_lr",
        least_rate=1.0,
        warmup=(10, 0),
        length=512,
    ),
}


LORA_1B = axolotl(
    2e-4,
    Set(path="teknium/GPT4-LLM-Cleaned", type="alpaca"),
    step=(2, 2),
    warmup=(0, 0.1),
    length=2048,
    held_out=0.1,
    adapter=Adapter(
        rank=16,
        alpha=32,
        dropout=0.05,
        modules=("gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"),
    ),
)
AXOLOTL_LORA: Mapping[str, Meaning] = {
    "swanlab/lora-swanlab-profiling": LORA_1B,
    "qwen3/8b-lora-fused-attn": axolotl(
        2e-4, ALPACA, step=(1, 4), warmup=(0, 0.1), length=4096, held_out=0.05, adapter=Adapter(rank=32, alpha=64)
    ),
    "llama-2/lora, unquantised": axolotl(
        2e-4,
        ALPACA_2K,
        step=(2, 4),
        epochs=4,
        warmup=(10, 0),
        length=4096,
        held_out=0.05,
        adapter=Adapter(rank=32, alpha=16, dropout=0.05),
    ),
}


def llama_factory(*names: str, **more: object) -> Meaning:
    """What its examples share: 1 x 2 sequences, 1e-5, three epochs, a tenth of warm-up; packing is off for `sft`."""
    max_samples = 1000 if len(names) == 2 or names == ("alpaca_en",) else None
    sets = [Set(path=name, type="auto", max_samples=max_samples) for name in names]
    given: dict[str, object] = {"warmup": (0, 0.1), "length": 2048, **more}
    return Meaning(
        sets=sets, learning_rate=1e-5, schedule="cosine", epochs=3, step=(1, 2), packing=False,
        **given,  # type: ignore[arg-type]
    )  # fmt: skip


def traces(**more: object) -> Meaning:
    given: dict[str, object] = {"length": 32768, "clip": 1e-3, "decay": 0.01, **more}
    return llama_factory("tbench_traces_sharegptv1", **given)


def qwen3_lora(max_samples: int) -> Meaning:
    """A scale of twice the rank, which is its default."""
    sets = [Set(path=name, type="auto", max_samples=max_samples) for name in ("identity", "alpaca_en_demo")]
    meaning = llama_factory("identity", "alpaca_en_demo", adapter=Adapter(rank=8, alpha=16))
    return replace(meaning, sets=sets, learning_rate=1e-4, step=(1, 8))


LLAMA_FACTORY: Mapping[str, Meaning] = {
    "llama3_lora_sft": llama_factory("identity", "alpaca_en_demo", adapter=Adapter(rank=8, alpha=16)),
    "train_lora/qwen3_lora_sft": qwen3_lora(1000),
    "ktransformers/train_lora/qwen3moe_lora_sft_kt": qwen3_lora(100_000),
    "llama3_full_sft": llama_factory("identity", "alpaca_en_demo"),
    "nanbeige42_full_sft": llama_factory("identity", "alpaca_en_demo"),
    "qwen2_full_sft_ds3_gaudi": llama_factory("alpaca_en"),
    "qwen3_full_sft_fsdp2": traces(),
    "qwen3_full_sft_e2_adamw_bnb_8bit": traces(betas=(0.9, 0.98)),
    "qwen3_full_sft_256k": traces(length=204800),
    "qwen3_full_sft_alst": traces(length=196608),
    "qwen2_5_full_sft_fp8_te": traces(dtype="float32"),
    "extras/pure_bf16 with a warm-up below one": llama_factory(
        "identity", "alpaca_en_demo", warmup=(0.1, 0), held_out=0.1
    ),
}


def trl(rate: float, *sets: Set, **more: object) -> Meaning:
    """Its defaults: three epochs of 8 sequences, 1024 tokens, no packing. All tokens of a conversation have loss, and
    of a prompt with a completion those of the completion. Its recipes warm up in a tenth of the steps."""
    given: dict[str, object] = {
        "epochs": 3,
        "step": (8, 1),
        "length": 1024,
        "packing": False,
        "schedule": "cosine",
        "warmup": (0, 0.1),
        "trains_on_inputs": "conversations",
        **more,
    }
    return Meaning(sets=sets, learning_rate=rate, **given)  # type: ignore[arg-type]


def hub(path: str, name: str | None = None, split: str = "train") -> Set:
    return Set(path=path, type="auto", name=name, split=split)


def mixed(path: str) -> Set:
    return hub(path, "default", "train_sft")


TENTH: Mapping[str, object] = {"schedule": "cosine_with_min_lr", "least_rate": 0.1}

LINEAR: Mapping[str, object] = {"schedule": "linear", "warmup": (0, 0)}
"""The schedule of transformers, where no recipe has another one."""

TRL: Mapping[str, Meaning] = {
    "docs/lora_without_regret": trl(
        2e-5,
        hub("open-thoughts/OpenThoughts-114k"),
        epochs=1,
        step=(2, 16),
        packing=True,
        **LINEAR,
        adapter=Adapter(rank=256, alpha=16, dropout=0.05),
    ),
    "docs/peft_integration": trl(
        2e-5,
        hub("trl-lib/Capybara"),
        **LINEAR,
        adapter=Adapter(rank=32, alpha=16, dropout=0.05, modules=("q_proj", "v_proj")),
    ),
    "trl/example_config": trl(1e-4, hub("stanfordnlp/imdb"), warmup=(0, 0)),
    "handbook/zephyr-7b-beta": trl(
        2e-5, mixed("HuggingFaceH4/ultrachat_200k"), epochs=1, step=(16, 1), length=2048, held_out=8
    ),
    "open-r1/R1-Distill-Qwen-Math-7B": trl(
        2e-5, mixed("open-r1/OpenR1-Math-220k"), epochs=5, step=(2, 8), length=32768, clip=0.2, **TENTH
    ),
    "handbook/smollm3": trl(
        2e-5,
        mixed("HuggingFaceTB/smoltalk2"),
        epochs=5,
        step=(1, 2),
        length=65536,
        packing=True,
        clip=0.2,
        trains_on_inputs=False,
        **TENTH,
    ),
    "handbook/starchat2-15b": trl(
        2e-5,
        mixed("HuggingFaceH4/airoboros-3.2"),
        mixed("HuggingFaceH4/Code-Feedback"),
        step=(8, 2),
        length=2048,
        held_out=8,
    ),
    "handbook/gpt2-nl": trl(2e-4, hub("yhavinga/mc4_nl_cleaned", "tiny"), epochs=1, step=(16, 1)),
    "open-r1/OlympicCoder-7B": trl(
        2e-5,
        hub("open-r1/codeforces-cots", "solutions_decontaminated"),
        epochs=10,
        step=(2, 8),
        length=32768,
        clip=0.2,
        warmup=(0, 0.03),
        **TENTH,
    ),
    "open-r1/Qwen2.5-1.5B-Instruct": trl(
        2e-5,
        hub("open-r1/s1K-1.1", "all"),
        epochs=15,
        step=(2, 1),
        length=32768,
        packing=True,
        warmup=(0, 0.05),
        **TENTH,
    ),
    "open-r1/Doge-20M-Instruct": trl(
        8e-4, hub("HuggingFaceH4/Bespoke-Stratos-17k", "all"), epochs=1, step=(4, 4), length=4096, packing=True
    ),
}


def torchtune(rate: float, path: str = "tatsu-lab/alpaca", **more: object) -> Meaning:
    """Its defaults: a constant rate, AdamW's own decay of 0.01, no clipping, loss on the prompts of Alpaca. A length of
    null truncates nothing there; Ratel's own stays, and is asked about."""
    given: dict[str, object] = {"epochs": 1, "step": (2, 1), "schedule": "constant", "warmup": (0, 0), **more}
    return Meaning(
        sets=[Set(path=path, type="alpaca")], learning_rate=rate, length=1024, packing=False, decay=0.01, clip=None,
        trains_on_inputs=True,
        **given,  # type: ignore[arg-type]
    )  # fmt: skip


TORCHTUNE: Mapping[str, Meaning] = {
    "llama3_1/8B_full_single_device": torchtune(2e-5),
    "gemma2/2B_full": torchtune(2e-5),
    "llama3_1/70B_full": torchtune(2e-5, epochs=3),
    "phi3/mini_full_low_memory": torchtune(5e-6, "yahma/alpaca-cleaned"),
    "mistral/7B_full": torchtune(5e-6, epochs=3),
    "qwen2_5/7B_full_single_device": torchtune(5e-6, "yahma/alpaca-cleaned"),
    "llama3_2/1B_full": torchtune(2e-5, epochs=3, step=(4, 4), schedule="cosine", warmup=(10, 0)),
}

MEANINGS: Mapping[str, Meaning] = {
    f"{tool}: {name}": meaning
    for tool, meanings in (
        ("axolotl", AXOLOTL),
        ("axolotl", AXOLOTL_LORA),
        ("LLaMA-Factory", LLAMA_FACTORY),
        ("TRL", TRL),
        ("torchtune", TORCHTUNE),
    )
    for name, meaning in meanings.items()
}
