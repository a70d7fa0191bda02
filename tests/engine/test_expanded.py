"""What is made of a layer's weights, whatever its tokens are, is in the plan: measured beside what it takes."""

from __future__ import annotations

import warnings
import weakref
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from ratel_cli.model.cut.find_blocks import find_blocks
from ratel_cli.model.export.adapters import inject
from ratel_cli.model.files.skeleton import build_skeleton
from ratel_cli.model.values.adapter_settings import AdapterSettings
from ratel_cli.model.values.operators import OperatorMode, TorchOperator, tensors_in
from ratel_cli.planning.profile.activations import expanded_bytes
from tests.engine.architectures import tiny_config
from tests.engine.machine import attention_of

TOKENS = 3
"""So few that activations are small beside weights."""
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


class _Peak(OperatorMode):
    """The most bytes of storages that operators have made and that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._known = set[int]()

    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs))}
        result = func(*args, **kwargs)
        for each in tensors_in(result):
            storage = each.untyped_storage()
            if storage._cdata not in given | self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += num_bytes
        self.most = max(self.most, self.live)

        def end() -> None:
            self._known.discard(key)
            self.live -= num_bytes

        weakref.finalize(storage, end)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", AdapterSettings(rank=2, alpha=4, has_magnitudes=True)),
        ("gpt2", AdapterSettings(rank=2, alpha=4, has_magnitudes=True)),
        ("mixtral", AdapterSettings(rank=2, alpha=4)),
        ("gpt_oss", AdapterSettings(rank=2, alpha=4, target_parameters=EXPERTS)),
    ],
    ids=["llama, dora", "gpt2, dora", "mixtral, experts", "gpt_oss, experts"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_plan_has_what_peft_makes(architecture: str, settings: AdapterSettings, dtype: str) -> None:
    config = tiny_config(architecture, **LARGER[architecture])
    skeleton = build_skeleton(config, dtype=dtype, attn_implementation=attention_of(config))  # type: ignore[arg-type]
    inject(skeleton, settings)
    spec = find_blocks(skeleton, name="tiny").spec
    planned = max(expanded_bytes(spec, layer) for layer in spec.layers)
    build = partial(AutoModelForCausalLM.from_config, attn_implementation=attention_of(config))
    model = build(config, dtype=getattr(torch, dtype)).train().requires_grad_(False)
    plain = _peak(model)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        target_modules="all-linear",
        use_dora=settings.has_magnitudes,
        target_parameters=list(settings.target_parameters) or None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(model, lora)
    measured = _peak(model) - plain
    # The rest are gradients of adapters, and activations of three tokens.
    assert 0.5 * planned < measured < planned + 150_000


LARGER: dict[str, dict[str, object]] = {
    "llama": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 1},
    "gpt2": {"n_embd": 256, "n_layer": 1},
    "mixtral": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1},
    "gpt_oss": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1},
}


def _peak(model: torch.nn.Module) -> int:
    """Of forward and backward, without gradients of weights."""
    embedded = model.get_input_embeddings()(torch.arange(TOKENS)[None])  # type: ignore[operator]
    with _Peak() as peak:
        model(inputs_embeds=embedded.detach().requires_grad_(), use_cache=False).logits.float().sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    return peak.most
