"""Small modules of many shapes, with a loss each, as a loop of one's own has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, NUM_TOKENS, NUM_PIXELS = 61, 7, 8


@dataclass(frozen=True)
class NetBatch:
    """One batch: what a module gets by name, and what its output is compared with."""

    inputs: dict[str, torch.Tensor]
    target: torch.Tensor
    num_targets: int = 1


@dataclass(frozen=True)
class Net:
    """A kind of module."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], NetBatch]
    loss: Callable[[nn.Module, NetBatch], torch.Tensor]
    blocks: str | Sequence[str] | None = None
    outside: Sequence[str] = ()


class Residual(nn.Module):
    """Convolutions that are added to what they get, with statistics over batches: buffers that forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(_Bottleneck(8) for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(pixels)).mean(dim=(2, 3)))


class _Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Conv2d(width, width, 3, padding=1),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden + self.inner(hidden))


class TwoStreams(nn.Module):
    """Two streams that pass through every block side by side, as in Flux."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(_Double(16) for _ in range(3))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        scale = {"gain": left.mean(dim=-1, keepdim=True)}
        for block in self.pairs:
            left, right = block(left, right=right, scale=scale)
        return left + right


class _Double(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.turn = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(
        self, left: torch.Tensor, *, right: torch.Tensor, scale: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = self.mix(torch.cat([left, right], dim=-1)) * (1 + scale["gain"])
        return left + torch.tanh(mixed), right + torch.sin(self.turn(mixed))


def _tokens(generator: torch.Generator, *, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, num_tokens), generator=generator)


def _causal(generator: torch.Generator) -> NetBatch:
    tokens = _tokens(generator)
    return NetBatch({"input_ids": tokens}, tokens)


def _masked(generator: torch.Generator) -> NetBatch:
    tokens = _tokens(generator)
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.5, -100)
    labels[:, 0] = tokens[:, 0]
    return NetBatch({"input_ids": tokens, "attention_mask": mask}, labels)


def _translated(generator: torch.Generator) -> NetBatch:
    return NetBatch({"input_ids": _tokens(generator)}, _tokens(generator, num_tokens=5))


def _heard(generator: torch.Generator) -> NetBatch:
    features = torch.randn(2, 4, 16, generator=generator)
    return NetBatch({"input_features": features}, _tokens(generator, num_tokens=5))


def _image(generator: torch.Generator) -> NetBatch:
    pixels = torch.randn(3, 3, NUM_PIXELS, NUM_PIXELS, generator=generator)
    return NetBatch({"pixel_values": pixels}, torch.randint(5, (3,), generator=generator))


def _latents(generator: torch.Generator) -> NetBatch:
    inputs = {
        "hidden_states": torch.randn(2, 4, NUM_PIXELS, NUM_PIXELS, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
        "class_labels": torch.randint(10, (2,), generator=generator),
    }
    return NetBatch(inputs, torch.randn(2, 4, NUM_PIXELS, NUM_PIXELS, generator=generator))


def _vectors(generator: torch.Generator) -> NetBatch:
    inputs = {name: torch.randn(2, 5, 16, generator=generator) for name in ("left", "right")}
    return NetBatch(inputs, torch.randn(2, 5, 16, generator=generator))


def _with_labels(model: nn.Module, batch: NetBatch) -> torch.Tensor:
    loss = model(**_in_dtype(model, batch.inputs), labels=batch.target).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def _classified(model: nn.Module, batch: NetBatch) -> torch.Tensor:
    return cross_entropy(model(*_in_dtype(model, batch.inputs).values()).float(), batch.target)


def _compared(model: nn.Module, batch: NetBatch) -> torch.Tensor:
    output = model(**_in_dtype(model, batch.inputs))
    output = output if isinstance(output, torch.Tensor) else output.sample
    return (output.float() - batch.target).square().mean()


def _in_dtype(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dtype = next(model.parameters()).dtype
    return {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}


def _of_transformers(architecture: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config_name = next(
            name for ending in ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "LMHeadModel",
                                "ForImageClassification") if architecture.endswith(ending)
            for name in [architecture.removesuffix(ending)]
        )  # fmt: skip
        config = getattr(transformers, f"{config_name}Config")(**settings)
        model: nn.Module = getattr(transformers, architecture)(config)
        return model

    return build


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    model: nn.Module = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=NUM_PIXELS,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=1,
    )
    return model


_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
NETS = {
    "residual": Net(Residual, lambda g: NetBatch({"pixels": _image(g).inputs["pixel_values"]}, _image(g).target),
                    _classified),
    "sequential": Net(
        lambda: nn.Sequential(
            nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 24), nn.ReLU(inplace=True), nn.Linear(24, 16)
        ),
        lambda g: NetBatch({"input": torch.randn(4, 16, generator=g)}, torch.randn(4, 16, generator=g)),
        _compared,
    ),
    "two streams": Net(TwoStreams, _vectors, _compared),
    "gpt2": Net(
        _of_transformers("GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=32),
        _causal,
        _with_labels,
    ),
    "llama": Net(
        _of_transformers("LlamaForCausalLM", **_SMALL, intermediate_size=24, num_key_value_heads=1),
        _causal,
        _with_labels,
    ),
    "rwkv": Net(
        _of_transformers(
            "RwkvForCausalLM", vocab_size=VOCABULARY, context_length=32, hidden_size=16, num_hidden_layers=3,
            attention_hidden_size=16, intermediate_size=24, rescale_every=2, use_cache=False,
        ),
        _causal,
        _with_labels,
    ),
    "bert": Net(_of_transformers("BertForMaskedLM", **_SMALL, intermediate_size=24), _masked, _with_labels),
    "albert": Net(
        _of_transformers("AlbertForMaskedLM", **_SMALL, intermediate_size=24, embedding_size=8),
        _masked,
        _with_labels,
        blocks="albert.encoder.albert_layer_groups",
    ),
    "t5": Net(
        _of_transformers(
            "T5ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
            decoder_start_token_id=0,
        ),
        _translated,
        _with_labels,
    ),
    "whisper": Net(
        _of_transformers(
            "WhisperForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24,
            num_mel_bins=4, max_source_positions=8, max_target_positions=16, decoder_start_token_id=0, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
        ),
        _heard,
        _with_labels,
    ),
    "vit": Net(
        _of_transformers(
            "ViTForImageClassification", hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=24, image_size=NUM_PIXELS, patch_size=4, num_labels=5,
        ),
        _image,
        _with_labels,
    ),
    "dit": Net(_dit, _latents, _compared, outside=["transformer_blocks.0.norm1.emb"]),
}  # fmt: skip
