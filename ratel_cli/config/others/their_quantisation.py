"""Quantised models of other trainers: their keys become `load_in_4bit`, `load_in_8bit` and double quantisation.

Invariant: the bytes of a rewritten config's model are those that the other trainer would have, or there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratel_cli.config.keys.key_groups import OF_QUANTISATION
from ratel_cli.config.yaml.reporting import Entries, Report, made
from ratel_cli.config.yaml.yaml_marks import plain, show

_BITS: Mapping[int, str] = {4: "load_in_4bit", 8: "load_in_8bit"}
"""LLaMA-Factory's `quantization_bit`."""
_DOUBLE: Sequence[str] = ("double_quantization", "use_bnb_nested_quant")
"""Names of LLaMA-Factory and TRL for double quantisation."""
_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_OPTIONS = "bnb_config_kwargs"
"""axolotl's mapping of other settings of 4 bit, which replace those of its own."""
_OF_FILES: Mapping[str, str] = {"Mxfp4Config": "MXFP4", "FineGrainedFP8Config": "fp8"}
"""axolotl's `model_quantization_config`: how the files of the base model are quantised."""


def translate_quantisation(entries: Entries, report: Report) -> None:
    """What is quantised, and how. TRL has no double quantisation by default; axolotl and LLaMA-Factory have it."""
    _take_form_of_files(entries, report)
    for key in [key for key in entries if key in OF_QUANTISATION and entries[key].value.content in (None, "")]:
        report.drop_empty(entries.pop(key))
    bits = entries.get("quantization_bit")
    method = entries["quantization_method"].value.content if "quantization_method" in entries else "bnb"
    content = None if bits is None else bits.value.content
    if bits is not None and isinstance(content, int) and content in _BITS and method in ("bnb", "bitsandbytes"):
        report.read_as(entries.pop("quantization_bit"), f"{_BITS[content]}: true")
        entries.setdefault(_BITS[content], made(bits, True))
    is_on = "load_in_4bit" in entries and entries["load_in_4bit"].value.content is True
    _take_options(entries, report, is_on=is_on)
    for key in (key for key in _DOUBLE if key in entries):
        entry = entries.pop(key)
        if is_on:
            report.read_as(entry, f"bnb_4bit_use_double_quant: {show(plain(entry.value))}")
            entries.setdefault("bnb_4bit_use_double_quant", entry)
        else:
            report.drop(entry, "nothing is quantised to 4 bit")
    if is_on and "use_peft" in entries:
        entries.setdefault("bnb_4bit_use_double_quant", made(entries["load_in_4bit"], False))
    computed = entries.get("bnb_4bit_compute_dtype")
    if computed is not None and "dtype" in entries:
        names = {str(entries["dtype"].value.content), str(computed.value.content)}
        if len({_DTYPES.get(name, name) for name in names}) == 1:
            report.drop(entries.pop("bnb_4bit_compute_dtype"), "it is `dtype`")


def _take_options(entries: Entries, report: Report, *, is_on: bool) -> None:
    """Let axolotl's mapping of settings be keys of their own."""
    options = entries.get(_OPTIONS)
    if options is None:
        return
    content = options.value.content
    if not is_on:
        report.drop(entries.pop(_OPTIONS), "nothing is quantised to 4 bit")
    elif isinstance(content, dict) and content:
        del entries[_OPTIONS]
        report.read_as(options, ", ".join(f"{key}: {show(plain(each.value))}" for key, each in content.items()))
        for key in content.keys() & entries.keys():
            report.drop(entries[key], f"`{_OPTIONS}` has it, too")
        entries.update(content)


def _take_form_of_files(entries: Entries, report: Report) -> None:
    """Drop the form of the base model's files where the config has them dequantised. Ratel always reads such files as
    the numbers that their codes stand for."""
    form, options = (entries.get(key) for key in ("model_quantization_config", "model_quantization_config_kwargs"))
    if form is None or options is None or form.value.content not in _OF_FILES:
        return
    if plain(options.value) == {"dequantize": True}:
        reason = f"weights in {_OF_FILES[str(form.value.content)]} are dequantised when they are read"
        for entry in (form, options):
            report.drop(entry, reason)
        del entries["model_quantization_config"], entries["model_quantization_config_kwargs"]
