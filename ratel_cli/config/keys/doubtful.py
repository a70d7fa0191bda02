"""Keys of a config that a run ignores, and values that can hardly be meant: what a user hears of before it begins."""

from __future__ import annotations

from ratel_cli.config.keys.key_groups import OF_ADAPTER, OF_PREFERENCES, OF_WARMUP
from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.config.keys.sections import Contradiction

_GREAT_LEARNING_RATE = 0.1
_LEAST_OF_ADAPTER = 3e-5
_NOT_READ_BY: dict[str, tuple[str, ...]] = {
    "lion": ("adam_epsilon",),
    "sgd": ("adam_beta1", "adam_beta2", "adam_epsilon"),
}
"""By optimizer: keys of others."""


def doubtful_keys(config: RunConfig) -> list[Contradiction]:
    """Keys that the user set and that this run ignores, and values that can hardly be meant, each with the reason."""
    found = []
    if config.max_steps is not None and config.num_epochs != 1:
        found.append(_unused("num_epochs", f"`max_steps` ({config.max_steps}) decides when the run ends"))
    if config.max_steps is not None and config.warmup_steps > config.max_steps:
        steps = f"`warmup_steps` is {config.warmup_steps}, but `max_steps` is {config.max_steps}"
        message = f"{steps}: the run ends during warm-up"
        found.append(Contradiction(keys=("warmup_steps",), message=message))
    if config.warmup_steps:
        found.extend(_unused(key, "`warmup_steps` is set") for key in OF_WARMUP if _differs(config, key))
    if not config.saves and config.save_total_limit != 1:
        found.append(_unused("save_total_limit", "`save_steps` is not set"))
    if not config.val_set_size and not config.test_datasets:
        given = (key for key in ("eval_steps", "evals_per_epoch") if getattr(config, key) is not None)
        found.extend(_unused(key, "`val_set_size` is 0") for key in given)
    found.extend(_unused_of_best(config))
    if config.task == "denoising" and config.sequence_len != type(config).model_fields["sequence_len"].default:
        found.append(_unused("sequence_len", "the size of the latents decides the number of tokens"))
    if config.task == "denoising":
        given = (
            key
            for key in ("label_smoothing_factor", "use_dft_loss", "embedding_lr", "embedding_lr_scale")
            if _differs(config, key)
        )
        found.extend(_unused(key, "latents are not tokens") for key in given)
    if not config.load_in_4bit and _differs(config, "bnb_4bit_use_double_quant"):
        found.append(_unused("bnb_4bit_use_double_quant", "`load_in_4bit` is not set"))
    found += _of_preferences(config) + _of_adapter(config)
    found.extend(
        _unused(key, f"`optimizer` is {config.optimizer}")
        for key in _NOT_READ_BY.get(config.optimizer, ())
        if _differs(config, key)
    )
    if config.learning_rate > _GREAT_LEARNING_RATE and config.optimizer != "sgd":
        message = f"`learning_rate` is {config.learning_rate:g}: every weight moves by about that much in a step"
        found.append(Contradiction(keys=("learning_rate",), message=message, hint="1e-6 to 1e-3 are usual"))
    return found


def _of_adapter(config: RunConfig) -> list[Contradiction]:
    if config.adapter is None:
        keys = (*OF_ADAPTER, "loraplus_lr_ratio")
        return [_unused(key, "`adapter` is not set") for key in keys if _differs(config, key)]
    found = []
    is_usual_method = config.rl is None and config.optimizer in ("adamw", "adamw_8bit")
    if config.learning_rate < _LEAST_OF_ADAPTER and is_usual_method:
        message = f"`learning_rate` is {config.learning_rate:g}: that suits full fine-tuning, and is low for an adapter"
        hint = "1e-4 to 5e-4 are usual for LoRA"
        found.append(Contradiction(keys=("learning_rate",), message=message, hint=hint))
    if not config.lora_modules_to_save:
        given = (key for key in ("embedding_lr", "embedding_lr_scale") if _differs(config, key))
        found.extend(_unused(key, "embedding and head are frozen beside an adapter") for key in given)
    return found


def _of_preferences(config: RunConfig) -> list[Contradiction]:
    if config.rl is None:
        return [_unused(key, "`rl` is not set") for key in OF_PREFERENCES if _differs(config, key)]
    of_methods = {key: method for method, keys in _OF_METHODS.items() for key in keys}
    found = [
        _unused(key, f"it is for `rl: {method}`")
        for key, method in of_methods.items()
        if method != config.rl and _differs(config, key)
    ]
    if config.rl == "kto" and config.micro_batch_size == 1:
        message = "`micro_batch_size` is 1: the KL divergence of each micro-batch is estimated from one answer"
        found.append(Contradiction(keys=("micro_batch_size",), message=message, hint="set it to 2 or more"))
    if config.train_on_inputs is True:
        found.append(_unused("train_on_inputs", "preference losses do not count prompts"))
    if config.sample_packing and "sample_packing" in config.model_fields_set:
        found.append(_unused("sample_packing", "preference data is not packed"))
    return found


_OF_METHODS = {"simpo": ("simpo_gamma", "cpo_alpha"), "kto": ("kto_desirable_weight", "kto_undesirable_weight")}


def _unused_of_best(config: RunConfig) -> list[Contradiction]:
    """Keys about the best step that nothing follows from."""
    deciding = [key for key in ("load_best_model_at_end", "early_stopping_patience") if _differs(config, key)]
    if not config.evaluates_steps:
        reason = "only the last step is evaluated" if config.val_set_size or config.test_datasets else ""
        return [_unused(key, reason or "there is no data to evaluate on") for key in deciding]
    keys = () if deciding else ("metric_for_best_model", "greater_is_better")
    found = [_unused(key, "`load_best_model_at_end` is not set") for key in keys if _differs(config, key)]
    if config.early_stopping_patience is None and _differs(config, "early_stopping_threshold"):
        found.append(_unused("early_stopping_threshold", "`early_stopping_patience` is not set"))
    return found


def _differs(config: RunConfig, key: str) -> bool:
    """Whether a key has another value than its default."""
    return bool(getattr(config, key) != RunConfig.model_fields[key].default)


def _unused(key: str, reason: str) -> Contradiction:
    return Contradiction(keys=(key,), message=f"`{key}` is ignored: {reason}")
