"""The config's surface is a promise: every key, its type, its default and its sentence, in `surface.golden`.

After a change that is meant: python tests/config/test_config_surface.py
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ratel_cli.config.aliases import SECTIONS
from ratel_cli.config.sections import Section

GOLDEN = Path(__file__).with_name("surface.golden")
OF_THE_INTERFACE = """
    base_model model_shape cost_model random_init datasets train_on_inputs sequence_len sample_packing shuffle
    micro_batch_size gradient_accumulation_steps num_epochs max_steps learning_rate lr_scheduler warmup_steps
    warmup_ratio optimizer adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm dtype gradient_dtype
    device attn_implementation activations optimizer_overlap deterministic trace storage limits output_dir
    save_steps save_total_limit eval_steps val_set_size logging_steps report_to seed
"""


def describe_type(annotation: object) -> str:
    """A type in the words of the config."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return describe_type(get_args(annotation)[0])
    if origin is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    if origin in (Union, types.UnionType):
        return "|".join(describe_type(each) for each in get_args(annotation))
    if origin is tuple:
        return f"[{describe_type(get_args(annotation)[0])}]"
    if annotation is type(None):
        return "null"
    assert isinstance(annotation, type)
    return {"str": "text", "Path": "path"}.get(annotation.__name__, annotation.__name__)


def describe_default(field: FieldInfo) -> str:
    """A default in the words of YAML."""
    default: object = field.default
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "[]"
    if isinstance(default, Section):
        return "{}"
    return str(default) if isinstance(default, str | int | float | PosixPath) else repr(default)


def surface() -> Iterator[str]:
    """Every key of every section."""
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            key = f"{section}.{name}" if section else name
            yield f"{key}: {describe_type(field.annotation)} = {describe_default(field)}"
            yield "    " + " ".join((field.description or "").split())


def test_the_surface_is_the_golden_one() -> None:
    assert "\n".join(surface()) + "\n" == GOLDEN.read_text()


def test_the_keys_are_those_of_the_interface() -> None:
    assert list(SECTIONS[""].model_fields) == OF_THE_INTERFACE.split()


def test_every_key_is_explained() -> None:
    for model in SECTIONS.values():
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name} has no docstring"


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(surface()) + "\n")
