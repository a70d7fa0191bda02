"""A skeleton: a Hugging Face model without its weights, with parameters on the meta device and real buffers.

Invariants: nothing here knows a model family, and weights take no memory: a 100B skeleton takes only the memory of its
Python objects.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from ratel_cli.errors import BadInput, excerpt
from ratel_cli.model.files.denoiser_config import reject_denoiser
from ratel_cli.model.files.directory import check_sidecars
from ratel_cli.model.files.kind import loading_class, reject_other_kinds, text_config
from ratel_cli.model.values.flash_attention import KERNEL_PACKAGES
from ratel_cli.model.values.kept_precision import keep_in_fp32
from ratel_cli.model.values.spec import check_depth
from ratel_cli.sizes import DtypeName, Task

DTYPES: dict[DtypeName, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAMES_OF_DTYPES: dict[torch.dtype, DtypeName] = {dtype: name for name, dtype in DTYPES.items()}
_FACTORIES: frozenset[Callable[..., object]] = frozenset(
    {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn}
)
_LARGE_BYTES = 1 << 30
"""No buffer of a model is as large as this."""
_PROBABILITIES = ("dropout", "_pdrop", "_dropout_prob")
"""Endings of keys whose values are probabilities."""
_NEEDED_PROBABILITIES = (
    "attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop", "attention_probs_dropout_prob",
    "hidden_dropout_prob",
)  # fmt: skip
"""Keys of these that the layers use, so that null is no value for them."""
_POSITIONS = ("max_position_embeddings", "n_positions")
"""Endings of keys whose values are numbers of positions."""
_TOO_LARGE = 2**31
"""No number of a model is as large as this."""
_SCALES = ("initializer_range", "initializer_factor", "init_std", "init_method_std")
"""Endings of keys whose values scale what the initialisers of transformers draw."""


def read_model_config(directory: Path, task: Task = "causal_lm") -> PretrainedConfig:
    """The configuration of a model that can be trained for a task.

    Raises BadInput if transformers cannot read it without running remote code, or if it is a model of another kind.
    """
    config = read_any_config(directory)
    reject_other_kinds(config, task)
    num_layers = getattr(text_config(config), "num_hidden_layers", None)
    if isinstance(num_layers, int):
        check_depth(num_layers)
    return config


def read_any_config(directory: Path) -> PretrainedConfig:
    """The configuration of a model of any kind. Raises BadInput if transformers cannot read it without running remote
    code."""
    check_sidecars(directory)
    reject_denoiser(directory)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise BadInput(
            f"{directory / 'config.json'}: not a model configuration that transformers knows: {_fact(error)}",
            "use a model that transformers supports by itself; a model's own code is never run",
        ) from error
    if hasattr(config, "compression_config"):  # as compressed-tensors called it
        config.quantization_config = config.compression_config
    return cast(PretrainedConfig, config)


def build_skeleton(
    config: PretrainedConfig, *, dtype: DtypeName, attn_implementation: str, task: Task = "causal_lm"
) -> PreTrainedModel:
    """Construct the model of `config` for a task, with meta parameters and real buffers.

    `torch.device("meta")` would lose the values of buffers too (rotary frequencies, causal masks), so only the
    registration of parameters is replaced. Raises BadInput if the model is no decoder or cannot be built.
    """
    for part in {id(each): each for each in (config, text_config(config))}.values():
        _reject_unsupported(part, task)
        _reject_contradictions(part)
    config = copy.deepcopy(config)  # from_config writes its arguments into it
    config.use_cache = False
    try:
        with parameters_on_meta(), warnings.catch_warnings():
            # Said below by name, with what to change.
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            model = _construct(config, attn_implementation, task, dtype=DTYPES[dtype])
            _compute_buffers(model)
    except Exception as error:
        raise BadInput(
            f"config.json: transformers cannot build a {config.model_type} language model from it: "
            f"{type(error).__name__}: {_fact(error)}",
            "install the package that transformers asks for"
            if isinstance(error, ImportError)
            else "check the values in the model's config.json",
        ) from error
    _reject_empty_parameters(model)
    keep_in_fp32(model)
    model.train()
    return model


def supported_attention(config: PretrainedConfig, wanted: str, task: Task = "causal_lm") -> str:
    """`wanted` if the model can use this attention implementation here, else `sdpa`, else `eager`, which all can."""
    others = (name for name in (wanted, "sdpa") if why_unsupported(config, name, task) is None)
    return next(others, "eager")


def why_unsupported(config: PretrainedConfig, attention: str, task: Task = "causal_lm") -> str | None:
    """Why the model cannot use this attention implementation on this machine; None if it can.

    Where a package of kernels is missing, transformers would look for one on the hub, so it is not asked then.
    """
    package = KERNEL_PACKAGES.get(attention)
    if package is not None and find_spec(package.module) is None:
        return f"{attention} needs the package {package.name}, which is not installed"
    try:
        with torch.device("meta"):
            _construct(copy.deepcopy(config), attention, task)
    except Exception:  # noqa: BLE001  if the config itself is wrong, building with eager reports it
        return f"{config.model_type} does not support {attention} attention"
    return None


def _construct(config: PretrainedConfig, attention: str, task: Task, **options: object) -> PreTrainedModel:
    model_class = loading_class(config, task)
    if issubclass(model_class, PreTrainedModel):
        return cast(PreTrainedModel, model_class._from_config(config, attn_implementation=attention, **options))
    model = model_class.from_config(config, attn_implementation=attention, trust_remote_code=False, **options)
    return cast(PreTrainedModel, model)


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the model's buffers as `from_pretrained` does: outside of constructors, in fp32.

    A constructor, which runs under the model's dtype, decides the dtype of a buffer. Had it decided the values as well,
    a table of positions would be that of rounded frequencies.
    """
    for module in model.modules():
        module._is_hf_initialized = False  # type: ignore[assignment]  # transformers' mark of what is done
    model.initialize_weights()


def _fact(error: Exception) -> str:
    """What an error says, on one line. Its validators put the fact below a line that ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    end = next((at for at, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return excerpt(" ".join(lines[: end + 1]), 300) or type(error).__name__


def _reject_unsupported(config: PretrainedConfig, task: Task) -> None:
    """Reject options whose loss terms or outputs the block-wise step would silently drop."""
    for option, meaning in (
        ("output_router_logits", "the auxiliary router loss"),
        ("output_hidden_states", "the hidden states of every layer"),
        ("output_attentions", "the attention maps"),
    ):
        if getattr(config, option, False):
            raise BadInput(
                f"config.json sets {option}: true, but {meaning} would need all layers in memory at once",
                f"set {option}: false in the model's config.json",
            )
    for option in ("layerdrop", "layer_dropout", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, option, 0.0):
            raise BadInput(
                f"config.json sets {option}: layers that are skipped at random are not supported",
                f"set {option}: 0 in the model's config.json",
            )
    if getattr(config, "is_encoder_decoder", False) and task != "seq2seq":
        raise BadInput(
            f"config.json: {config.model_type} is an encoder-decoder; it cannot be trained for this task",
            "it trains on datasets of type: seq2seq",
        )


def _reject_contradictions(config: PretrainedConfig) -> None:
    """Reject values that transformers accepts although its layers fail on them when they run."""
    values = config.to_dict()
    for key, value in values.items():
        if key.endswith(_PROBABILITIES) and isinstance(value, int | float) and not 0 <= value <= 1:
            raise BadInput(f"config.json: {key} is {value}; it must be a probability between 0 and 1")
        if key.endswith(_SCALES) and isinstance(value, int | float) and not 0 <= value < math.inf:
            raise BadInput(f"config.json: {key} is {value}; it must be a number that is not negative")
    for key in _NEEDED_PROBABILITIES:
        if key in values and not isinstance(values[key], int | float):
            raise BadInput(f"config.json: {key} is {values[key]}; it must be a probability between 0 and 1")
    counts = {key: getattr(config, key, None) for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    for key, number in {**values, **counts}.items():  # counts may have another name in the file
        if isinstance(number, int) and number < 1 and (key in counts or key.endswith(_POSITIONS)):
            raise BadInput(f"config.json: {key} is {number}; it must be at least 1")
        if isinstance(number, int) and number >= _TOO_LARGE:
            raise BadInput(f"config.json: {key} is {number}; it must be less than 2^31")
    heads, shared = (getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        raise BadInput(
            f"config.json: {heads} attention heads cannot share {shared} key-value heads",
            "make num_attention_heads a multiple of num_key_value_heads",
        )


def _reject_empty_parameters(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            values = model.config.to_dict().items()
            zeros = ", ".join(key for key, value in values if value == 0 and isinstance(value, int) and "_" in key)
            raise BadInput(
                f"config.json: {name} would have the shape {list(parameter.shape)}, without elements",
                f"one of these is not meant to be 0: {zeros}"
                if zeros
                else "check the sizes in the model's config.json",
            )


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which every newly registered parameter becomes a meta parameter. Shared parameters stay shared.

    Initialisers of transformers leave them alone, like parameters that are read from a file.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        if parameter is not None:
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


class _LargeOnMeta(TorchFunctionMode):
    """Makes tensors that only a parameter can need on the meta device at once.

    The others exist for a moment, unwritten. For one that is larger than RAM, such as all experts of a layer, the
    system refuses even that.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        keywords = dict(kwargs or {})
        if func in _FACTORIES and keywords.get("device") is None:
            made = func(*args, **{**keywords, "device": "meta"})
            if isinstance(made, torch.Tensor) and made.nbytes >= _LARGE_BYTES:
                return made
        return func(*args, **keywords)
