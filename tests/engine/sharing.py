"""Models whose layers share weights, as no small one of transformers does.

`SharingConfig`: a Gemma 4, with two carried streams, in which one block is used three times, and another one twice in
between. `SharingLlamaConfig`: a Llama whose layers have one MLP.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM


class SharingConfig(Gemma4TextConfig):
    model_type = "tests_sharing"


class SharingForCausalLM(Gemma4ForCausalLM):
    config_class = SharingConfig

    def __init__(self, config: SharingConfig) -> None:
        super().__init__(config)
        self._share()

    def tie_weights(self, *arguments: object, **keywords: object) -> None:
        super().tie_weights(*arguments, **keywords)
        if hasattr(self, "model"):
            self._share()

    def _share(self) -> None:
        layers = self.model.layers
        layers[2].mlp = layers[3].mlp = layers[0].mlp
        layers[3].self_attn.o_proj.weight = layers[1].self_attn.o_proj.weight


class SharingLlamaConfig(LlamaConfig):
    model_type = "tests_sharing_llama"


class SharingLlamaForCausalLM(LlamaForCausalLM):
    config_class = SharingLlamaConfig

    def __init__(self, config: SharingLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers[1:]:
            layer.mlp = self.model.layers[0].mlp


for config_class, model_class in (
    (SharingConfig, SharingForCausalLM),
    (SharingLlamaConfig, SharingLlamaForCausalLM),
):
    AutoConfig.register(config_class.model_type, config_class)
    AutoModelForCausalLM.register(config_class, model_class)
