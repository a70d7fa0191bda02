"""Quantised models of other trainers: their keys become `load_in_4bit`, `load_in_8bit` and double quantisation.

Invariant: the bytes of a rewritten config's model are those that the other trainer would have, or there is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratel_cli.config.keys.key_groups import OF_QUANTISATION
from ratel_cli.config.others.row import SAME, ForeignKey, Given, adds, empty, sets, spread

_DOUBLE = "double_quantization use_bnb_nested_quant"
"""Names of LLaMA-Factory and TRL for double quantisation."""
_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _in_4_bit(given: Given) -> bool:
    return given.value("load_in_4bit") is True


def _by_bitsandbytes(given: Given) -> bool:
    return given.value("quantization_method") in ("bnb", "bitsandbytes", None)


def _is_dtype(given: Given) -> bool:
    """Whether what 4 bit are computed in is what everything is."""
    names = {str(given.value("dtype")), str(given.value("bnb_4bit_compute_dtype"))}
    return "dtype" in given and len({_DTYPES.get(name, name) for name in names}) == 1


def _in_files(name: str, form: str) -> ForeignKey:
    """axolotl's form of the base model's files, where it has them dequantised: they are always read as the numbers that
    their codes stand for."""
    why = f"weights in {form} are dequantised when they are read"
    return ForeignKey(
        theirs="model_quantization_config",
        how="ignored",
        only=(name,),
        when=lambda given: given.value("model_quantization_config_kwargs") == {"dequantize": True},
        over={"model_quantization_config_kwargs": why},
        why=why,
    )


QUANTISATION = (
    ForeignKey(
        theirs="quant_config",
        how=spread(names={"compute_dtype": "bnb_4bit_compute_dtype"}, without="name"),
        only=lambda value: isinstance(value, dict) and value.get("name") in ("bnb", "auto"),
    ),
    _in_files("Mxfp4Config", "MXFP4"),
    _in_files("FineGrainedFP8Config", "fp8"),
    ForeignKey(theirs=" ".join(OF_QUANTISATION), how=empty, only=(None, "")),
    ForeignKey(
        theirs="quantization_bit", how=sets({"load_in_4bit": True}, keep=True), only=(4,), when=_by_bitsandbytes
    ),
    ForeignKey(
        theirs="quantization_bit", how=sets({"load_in_8bit": True}, keep=True), only=(8,), when=_by_bitsandbytes
    ),
    # axolotl's mapping of other settings of 4 bit, which replace those of its own.
    ForeignKey(
        theirs="bnb_config_kwargs",
        how="ignored",
        when=lambda given: not _in_4_bit(given),
        why="nothing is quantised to 4 bit",
    ),
    ForeignKey(theirs="bnb_config_kwargs", how=spread(), only=lambda value: isinstance(value, dict) and len(value) > 0),
    ForeignKey(theirs=_DOUBLE, how=sets({"bnb_4bit_use_double_quant": SAME}, keep=True), when=_in_4_bit),
    ForeignKey(theirs=_DOUBLE, how="ignored", why="nothing is quantised to 4 bit"),
    # TRL has no double quantisation by default; axolotl and LLaMA-Factory have it.
    ForeignKey(
        theirs="load_in_4bit",
        how=adds({"bnb_4bit_use_double_quant": False}),
        when=lambda given: _in_4_bit(given) and "use_peft" in given,
    ),
    ForeignKey(theirs="bnb_4bit_compute_dtype", how="ignored", when=_is_dtype, why="it is `dtype`"),
)
