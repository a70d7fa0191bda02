"""The config's surface is a promise: every key, in this order, each with its explanation.

docs/config.md holds types, bounds, defaults, aliases and meanings; `tests/test_docs.py` holds it against the schema.
"""

from __future__ import annotations

from ratel_cli.config.aliases import SECTIONS

OF_THE_INTERFACE = """
    base_model model_shape cost_model random_init datasets train_on_inputs sequence_len sample_packing shuffle
    micro_batch_size gradient_accumulation_steps num_epochs max_steps learning_rate lr_scheduler warmup_steps
    warmup_ratio optimizer adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm dtype gradient_dtype
    device attn_implementation activations optimizer_overlap deterministic trace storage limits output_dir
    save_steps save_total_limit eval_steps val_set_size logging_steps report_to seed
"""


def test_the_keys_are_those_of_the_interface() -> None:
    assert list(SECTIONS[""].model_fields) == OF_THE_INTERFACE.split()


def test_every_key_is_explained() -> None:
    for model in SECTIONS.values():
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} has no docstring"
