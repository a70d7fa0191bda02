"""Other trainers: by which keys a config is recognised as theirs, and which of their defaults are not ours.

Invariant: with a tool's defaults written out, a config trains here what it trains there; where that needs a key of a
dataset, `mask_of_sets` has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.others.aliases import ALIASES, TOP
from ratel_cli.config.others.torchtune import defaults_of_optimizer, is_torchtune
from ratel_cli.config.yaml.reporting import Entries
from ratel_cli.config.yaml.yaml_marks import Entry, Finding, Marked, Scalar

_SIGNS: Mapping[str, str] = {
    "axolotl": """base_model sequence_len micro_batch_size sample_packing dataset_prepared_path val_set_size strict
        lr_scheduler optimizer num_epochs saves_per_epoch evals_per_epoch special_tokens pad_to_sequence_len
        flash_attention load_in_8bit train_on_inputs pretraining_dataset plugins tokenizer_use_mistral_common""",
    "LLaMA-Factory": """stage finetuning_type dataset dataset_dir template cutoff_len overwrite_cache plot_loss
        preprocessing_num_workers pure_bf16 val_size flash_attn enable_liger_kernel""",
    "LLaMA-Factory v1": """train_dataset model_class peft_config kernel_config dist_config init_config quant_config
        optim_config lr_scheduler_config batching_strategy sample_backend""",
    "TRL": """dataset_name dataset_config dataset_mixture dataset_mixer dataset_train_split dataset_test_split
        max_seq_length max_length packing assistant_only_loss completion_only_loss dataset_text_field model_revision
        chat_template_path eos_token use_liger dataset_num_proc""",
    "transformers": "adafactor logging_dir dataloader_num_workers fp16_full_eval log_level_replica label_names",
}
"""By tool: keys that others hardly have."""
_TRAINER_DEFAULTS: Mapping[str, Scalar] = {
    "micro_batch_size": 8,
    "num_epochs": 3,
    "lr_scheduler": "linear",
    "warmup_ratio": 0,
}
_DEFAULTS: Mapping[str, Mapping[str, Scalar]] = {
    "axolotl": {
        "sequence_len": 512,
        "sample_packing": False,
        "excess_length_strategy": "drop",
        "warmup_ratio": 0.03,
        "warmup_rounding": "down",
        "max_warmup_steps": 100,
    },
    "LLaMA-Factory": {
        **_TRAINER_DEFAULTS,
        "learning_rate": 5e-5,
        "sequence_len": 2048,
        "sample_packing": False,
        "dtype": "float32",
    },
    "LLaMA-Factory v1": {
        "learning_rate": 1e-4,
        "lr_scheduler": "constant",
        "warmup_ratio": 0,
        "num_epochs": 3,
        "weight_decay": 0.01,
        "sequence_len": 2048,
        "sample_packing": False,
    },
    "TRL": {
        **_TRAINER_DEFAULTS,
        "sequence_len": 1024,
        "sample_packing": False,
        "train_on_inputs": "conversations",
    },
    "transformers": {**_TRAINER_DEFAULTS, "learning_rate": 5e-5, "sample_packing": False, "dtype": "float32"},
    "torchtune": {
        "sample_packing": False,
        "lr_scheduler": "constant",
        "warmup_ratio": 0,
        "max_grad_norm": 0,
    },
}
"""By tool: its defaults, where Ratel's are others."""
_SWITCHED_ON: Mapping[str, tuple[str, Scalar]] = {"LLaMA-Factory": ("finetuning_type", "lora")}
"""By tool: what it trains if its config does not say it, where that is not every weight."""
_MASK_KEYS = ("roles_to_train", "train_on_eos", "message_field_training")


def recognise(root: Marked, *, without: AbstractSet[str] = frozenset()) -> str:
    """The tool that a config is for, by its keys but those `without`; `Ratel` if it has none of another tool's."""
    if is_torchtune(root):
        return "torchtune"
    counts = {tool: len((root.entries.keys() & set(signs.split())) - without) for tool, signs in _SIGNS.items()}
    best = max(counts, key=lambda tool: counts[tool])
    if counts[best]:
        return best
    trainer = ("per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type", "model_name_or_path")
    return "transformers" if any(key in root.entries for key in trainer) else "Ratel"


def recognise_surely(root: Marked) -> str:
    """The tool that a config is for, by keys that a config of Ratel's own hardly has."""
    return recognise(root, without=RunConfig.model_fields.keys() | ALIASES[TOP].keys())


def defaults_of(tool: str, theirs: Marked) -> Mapping[str, Scalar]:
    """The defaults of a tool for a config with its keys, where Ratel's are others."""
    stage = theirs.entries.get("stage")
    is_pretraining = tool == "LLaMA-Factory" and stage is not None and stage.value.content == "pt"
    more: dict[str, Scalar] = {"sample_packing": True} if is_pretraining else {}
    if tool == "TRL" and theirs.entries.keys() & {"rl", "beta"}:
        more["learning_rate"] = 1e-6
    half = theirs.entries.get("bf16")
    if tool == "axolotl" and half is not None and half.value.content is None:
        more["dtype"] = "float32"  # its default is `auto`
    if tool == "axolotl" and theirs.entries.keys() & {"tokens", "resize_token_embeddings_to_32x"}:
        more["new_tokens_init"] = "random"
    method = theirs.entries.get("rl")
    if tool == "TRL" and method is not None and method.value.content == "kto":
        more["shuffle"] = False  # its trainer takes no other order
    if tool == "torchtune":
        more.update(defaults_of_optimizer(theirs))
    return {**_DEFAULTS.get(tool, {}), **more}


OTHER_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "LLaMA-Factory": {"max_length": "it is for generation there; see `cutoff_len`"},
}
"""By tool: names of ours that mean something else there, and what."""


_EXPERTS = "with transformers 5 {} gives routers and stacked experts no adapter; Ratel does"
_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    "axolotl": {
        "adapter": _EXPERTS.format("axolotl"),
        "datasets": (
            "axolotl splits a longer text into overlapping windows, each with an EOS token; Ratel's parts neither "
            "overlap nor get one"
        ),
    },
    "LLaMA-Factory": {
        "adapter": _EXPERTS.format("LLaMA-Factory"),
        "sequence_len": "LLaMA-Factory truncates prompt and answer in proportion, Ratel truncates the end",
    },
    "torchtune": {"sequence_len": "torchtune ends truncated samples with an EOS token, Ratel does not"},
}
"""By tool and key of ours: what becomes of it there, where no key of Ratel's gives that."""


def otherwise(tool: str, root: Marked) -> Iterator[tuple[str, str]]:
    """Keys of ours that a config has and that mean something else there, and what."""
    texts = [each["type"].value.content == "completion" for each in sets_in(root, "datasets") if "type" in each]
    adapter, sets = root.entries.get("adapter"), root.entries.get("datasets")
    names_modules = root.entries.keys() & {"lora_target_modules", "lora_target_parameters"}
    applies = {
        "sequence_len": "sequence_len" in root.entries and not (texts and all(texts)),
        "adapter": adapter is not None and adapter.value.content == "lora" and not names_modules,
        "datasets": sets is not None and sets.written == "pretraining_dataset",
    }
    yield from ((key, reason) for key, reason in _OTHERWISE.get(tool, {}).items() if applies[key])


def write_switch(tool: str, root: Marked) -> None:
    """Write out what the tool trains by default, under its own name."""
    key, value = _SWITCHED_ON.get(tool, ("", None))
    if key and (key not in root.entries or root.entries[key].value.content is None):
        where = replace(root.where, line=2**31)  # behind all that the user wrote
        root.entries[key] = Entry(where=where, written="", value=Marked(where=where, content=value))


def other_switch(tool: str, root: Marked) -> Finding | None:
    """A notice if the tool would train an adapter, because no key says what is trained. `root` has its names."""
    key, _ = _SWITCHED_ON.get(tool, ("", None))
    ours = {"base_model", "adapter", "unfrozen_parameters"}
    if not key or root.entries.keys() & {key, *ours}:
        return None
    message = f"without `{key}`, {tool} trains a LoRA adapter, but Ratel trains every weight; for an adapter write"
    return Finding(where=root.where, message=f"{message} `{key}: lora`")


def mask_of_sets(tool: str, root: Marked) -> Iterator[tuple[str, Marked, Entry]]:
    """The sets of conversations that the tool trains with a mask of its own, because no key says another one.

    For each the key that it is in, the set, and its `type`. `root` has our names.
    """
    if "rl" in root.entries:
        return
    for key in ("datasets", "test_datasets"):
        for each in root.entries[key].value.items if tool == "axolotl" and key in root.entries else ():
            keys = each.entries
            if "type" in keys and keys["type"].value.content == "chat_template" and not keys.keys() & set(_MASK_KEYS):
                yield key, each, keys["type"]


def write_mask(each: Marked) -> None:
    """Write axolotl's defaults of a mask into a set: the words of the assistant, and the EOS token behind them."""
    role = Marked(where=each.where, content="assistant")
    for key, content in (("roles_to_train", [role]), ("train_on_eos", "turn")):
        each.entries[key] = Entry(where=each.where, written="", value=Marked(where=each.where, content=content))


def write_system_column(root: Marked) -> None:
    """Write into axolotl's sets of conversations that a column `system` has the system prompt, as it has there."""
    for each in sets_in(root):
        if "type" in each and each["type"].value.content == "chat_template" and "field_system" not in each:
            where = each["type"].where
            each["field_system"] = Entry(where=where, written="", value=Marked(where=where, content="system"))


MASK = "roles_to_train: [assistant], train_on_eos: turn"
"""What `write_mask` writes."""


def other_length(tool: str, root: Marked) -> Finding | None:
    """A notice if the tool would drop samples that Ratel truncates, because no key says what becomes of them."""
    if tool != "axolotl" or "excess_length_strategy" in root.entries:
        return None
    for each in sets_in(root, "datasets"):
        if "type" in each and each["type"].value.content not in ("auto", "completion"):  # plain text is split there too
            message = "Ratel truncates samples longer than `sequence_len`, axolotl drops them; to drop them write"
            return Finding(where=root.entries["datasets"].where, message=f"{message} `excess_length_strategy: drop`")
    return None


def sets_in(root: Marked, *names: str) -> Iterator[Entries]:
    """The keys of each dataset; `names`: only of these keys of the top level."""
    for name in names or ("datasets", "test_datasets"):
        for each in root.entries[name].value.items if name in root.entries else ():
            yield each.entries


def other_mask(tool: str, root: Marked) -> Finding | None:
    """A notice if the tool would have its loss on other tokens than Ratel, because no key says which."""
    for _, _, entry in mask_of_sets(tool, root):
        message = "Ratel's loss on a turn ends with its end token, axolotl's with the EOS token; for that mask write"
        return Finding(where=entry.where, message=f"{message} `{MASK}` into the dataset")
    is_trl = tool == "TRL" and "rl" not in root.entries
    if is_trl and "train_on_inputs" not in root.entries and "datasets" in root.entries:
        message = "in conversations Ratel trains on the answers, TRL on all tokens; for all tokens write"
        return Finding(where=root.entries["datasets"].where, message=f"{message} `train_on_inputs: conversations`")
    return None
