"""A module of one's own trains through `forward_backward` as plain PyTorch does, and says what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from diffusers import DiTTransformer2DModel
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, Trainer

import ratel_cli as ratel
from tests.library.nets import NETS, NUM_PIXELS
from tests.library.test_own_loop import train
from tests.planning.test_diffusion import TABLE_VI
from tests.reference import Recipe, Trained, seed_of_draws, train_module
from tests.tiers import pairwise, thinned

pytestmark = pytest.mark.usefixtures("_measured_briefly")

Tensors = dict[str, torch.Tensor]
Loss = Callable[[object, Mapping[str, torch.Tensor]], torch.Tensor]
RATES = (4e-3, 2e-3, 8e-3, 4e-3, 4e-3)
"""At which every parameter changes in bf16."""


class Normed(nn.Module):
    """A residual network of convolutions, with norms of each sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(_Convolved(8) for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(pixels)).mean(dim=(2, 3)))


class _Convolved(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.GroupNorm(2, width), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(hidden + self.inner(hidden))


def _classified(output: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits  # type: ignore[attr-defined]
    return cross_entropy(logits.float(), batch["target"], reduction="sum")


def _denoised(output: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return (output.sample.float() - batch["target"]).square().mean(dim=(1, 2, 3)).sum()  # type: ignore[attr-defined]


def _denoised_with_variances(output: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of twice as many channels: the noise, and how uncertain it is."""
    noise, variances = output.sample.float().chunk(2, dim=1)  # type: ignore[attr-defined]
    return ((noise - batch["target"]).square() * torch.exp(-variances) + variances).mean(dim=(1, 2, 3)).sum()


def _unmasked(output: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits, target = output.logits.float(), batch["target"]  # type: ignore[attr-defined]
    return cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / target.shape[1]


def _next_word(output: object, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    return cross_entropy(output.flatten(0, 1), batch["target"].flatten(), reduction="sum")


@dataclass(frozen=True)
class Kind:
    """A module, what it gets and its loss."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], tuple[Tensors, torch.Tensor]]
    loss: Loss
    layers: str
    blocks: str | None = None


def _of(name: str, loss: Loss, layers: str, blocks: str | None = None) -> Kind:
    def inputs(generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        batch = NETS[name].batch(generator)
        return batch.inputs, batch.target

    return Kind(NETS[name].build, inputs, loss, layers, blocks)


def _image(generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    pixels = torch.randn(3, 3, NUM_PIXELS, NUM_PIXELS, generator=generator)
    return {"pixels": pixels}, torch.randint(5, (3,), generator=generator)


KINDS = {
    "vit": _of("vit", _classified, "vit.layers"),
    "dit": _of("dit", _denoised, "transformer_blocks"),
    "residual": Kind(Normed, _image, _classified, "blocks"),
    "a tied encoder": _of("bert", _unmasked, "bert.encoder.layer", "bert.encoder.layer"),
}


def built(kind: Kind, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return kind.build().to(dtype).train()


def steps_of(kind: Kind, dtype: torch.dtype, number: int, num_micro_batches: int) -> list[list[Tensors]]:
    generator = torch.Generator().manual_seed(number)

    def batch() -> Tensors:
        inputs, target = kind.inputs(generator)
        if "attention_mask" in inputs:
            target = target.masked_fill(target == -100, 3)  # the loss of each sample has as many tokens
        cast = {name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()}
        return {**cast, "target": target}

    return [[batch() for _ in range(num_micro_batches)] for _ in range(number)]


def sample_inputs(batch: Tensors) -> Tensors:
    return {name: each for name, each in batch.items() if name != "target"}


def sample_of(batch: Tensors) -> Tensors:
    return {name: each[:1] for name, each in sample_inputs(batch).items()}


@dataclass(frozen=True)
class _Micro:
    tensors: Tensors
    step: int
    position: int

    @property
    def num_targets(self) -> int:
        return len(self.tensors["target"])


def plain(kind: Kind, steps: Sequence[Sequence[Tensors]], recipe: Recipe) -> Trained:
    """What plain PyTorch makes of the module, with the draws that are promised."""
    model = built(kind, recipe.dtype).to(recipe.device)
    if isinstance(model, PreTrainedModel):
        model.tie_weights()  # on devices that torch does not know, `to` separates tied weights
    layers, place = list(model.get_submodule(kind.layers).children()), [0, 0]

    def seeding(block: int) -> Callable[..., None]:
        def seed(*_: object) -> None:
            step, position = place
            torch.manual_seed(seed_of_draws(recipe.seed, step=step, block=block, micro_batch=position))

        return seed

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(seeding(index + 1))
    layers[-1].register_forward_hook(seeding(len(layers) + 1))

    def loss_sum(batch: _Micro) -> torch.Tensor:
        place[:] = [batch.step, batch.position]
        seeding(0)()
        tensors = {name: each.to(recipe.device) for name, each in batch.tensors.items()}
        return kind.loss(model(**sample_inputs(tensors)), tensors)

    numbered = [
        [_Micro(tensors, step, position) for position, tensors in enumerate(batches)]
        for step, batches in enumerate(steps)
    ]
    weights = {name: each.detach().float().cpu().clone() for name, each in model.named_parameters()}
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    return train_module(model, loss_sum, weights, numbered, recipe, decayed=decayed)


def check(
    directory: Path,
    kind: Kind,
    dtype: torch.dtype,
    *,
    num_steps: int = len(RATES),
    num_micro_batches: int,
    max_grad_norm: float | None,
    oracle_device: str = "cpu",
    **options: object,
) -> None:
    """Train a module by `forward_backward` and in plain PyTorch: losses, norms, weights must be equal in every bit."""
    steps, rates = steps_of(kind, dtype, num_steps, num_micro_batches), RATES[:num_steps]
    recipe = Recipe(
        dtype=dtype, weight_decay=0.1, max_grad_norm=max_grad_norm, learning_rates=rates, device=oracle_device
    )
    wanted, module = plain(kind, steps, recipe), built(kind, dtype)
    before = {each: value.detach().clone() for each, value in module.named_parameters()}
    losses, norms = [], []
    with opened(module, kind, steps, directory, weight_decay=0.1, max_grad_norm=max_grad_norm, **options) as model:
        for batch, rate in zip(steps, rates, strict=True):
            losses.append(model.forward_backward(batch if num_micro_batches > 1 else batch[0], loss=kind.loss))
            model.step(learning_rate=rate)
            norms.append(model.grad_norm)
        model.save_pretrained(directory / "out")
    assert losses == list(wanted.losses)
    assert norms == list(wanted.norms)
    for each, found in written(directory / "out").items():
        assert torch.equal(found, wanted.weights[each].to(dtype)), each
        assert not torch.equal(found, before[each]), each


def written(directory: Path) -> Tensors:
    """The weights that were saved, which diffusers looks for under a name of its own."""
    [path] = directory.glob("*.safetensors")
    return load_file(path)


def opened(
    module: nn.Module, kind: Kind, steps: Sequence[Sequence[Tensors]], directory: Path, **options: object
) -> ratel.Model:
    options = {"device": "cpu", "sample": sample_of(steps[0][0]), "blocks": kind.blocks, **options}
    return ratel.open(module, storage=[directory / "a", directory / "b"], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "dtype", "num_micro_batches", "max_grad_norm"),
    thinned(pairwise(list(KINDS), [torch.float32, torch.bfloat16], [1, 3], [None, 0.5]), every=3),
)
def test_a_module_trains_as_plain_pytorch_does(
    tmp_path: Path, name: str, dtype: torch.dtype, num_micro_batches: int, max_grad_norm: float | None
) -> None:
    check(tmp_path, KINDS[name], dtype, num_micro_batches=num_micro_batches, max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("name", thinned(TABLE_VI, every=6))
def test_the_diffusion_models_of_the_paper_train(tmp_path: Path, name: str) -> None:
    """Table VI with a quarter of its layers, an eighth of its heads, and these a quarter as wide."""
    num_layers, num_heads, hidden_size = TABLE_VI[name]

    def build() -> nn.Module:
        model: nn.Module = DiTTransformer2DModel(
            num_layers=num_layers // 4, num_attention_heads=num_heads // 8,
            attention_head_dim=hidden_size // num_heads // 4, in_channels=4, out_channels=8, sample_size=NUM_PIXELS,
            patch_size=2, num_embeds_ada_norm=10, norm_num_groups=1,
        )  # fmt: skip
        return model

    kind = replace(KINDS["dit"], build=build, loss=_denoised_with_variances)
    check(tmp_path, kind, torch.bfloat16, num_steps=2, num_micro_batches=2, max_grad_norm=0.5)


def test_it_goes_on_where_it_was_left(tmp_path: Path) -> None:
    """Whatever weights the module has when it is opened again."""
    kind = KINDS["dit"]
    steps = steps_of(kind, torch.float32, 4, 2)
    for first, last in ((0, 2), (2, 4)):
        module = built(kind, torch.float32)
        if first:
            nn.init.zeros_(module.proj_out_2.weight)  # type: ignore[union-attr, arg-type]
        with opened(module, kind, steps, tmp_path) as model:
            assert model.num_steps == first
            for number in range(first, last):
                model.forward_backward(steps[number], loss=kind.loss)
                model.step(learning_rate=RATES[number])
            model.verify()
            model.save_pretrained(tmp_path / "out", overwrite=True)
    wanted = plain(kind, steps, Recipe(learning_rates=RATES[:4], weight_decay=0.0))
    found = written(tmp_path / "out")
    loaded = DiTTransformer2DModel.from_pretrained(tmp_path / "out")
    assert all(torch.equal(each, found[name]) for name, each in loaded.named_parameters())
    assert all(torch.equal(each, wanted.weights[name]) for name, each in found.items())


def test_a_module_that_is_built_on_the_drives(tmp_path: Path) -> None:
    """Of `ratel.init`: neither storage nor weights in memory."""
    kind = KINDS["vit"]
    steps = steps_of(kind, torch.float32, 2, 1)
    with ratel.init(storage=[tmp_path / "state"]):
        module = built(kind, torch.float32)
        model = ratel.open(module, sample=sample_of(steps[0][0]), device="cpu")
    with model:
        losses = train(model, steps, RATES, loss=kind.loss)
        assert "RAM" in ratel.explain(model)
    assert losses == list(plain(kind, steps, Recipe(learning_rates=RATES[:2], weight_decay=0.0)).losses)


def test_batches_may_have_more_and_fewer_samples(tmp_path: Path) -> None:
    kind = KINDS["residual"]
    [[whole]] = steps_of(kind, torch.float32, 1, 1)
    steps = [
        [{name: each[:rows] for name, each in whole.items()} for rows in of_step] for of_step in ([1], [3, 2], [2])
    ]
    with opened(built(kind, torch.float32), kind, steps, tmp_path) as model:
        losses = train(model, steps, RATES, loss=kind.loss)
    assert losses == list(plain(kind, steps, Recipe(learning_rates=RATES[:3], weight_decay=0.0)).losses)


def test_an_evaluation_draws_nothing(tmp_path: Path) -> None:
    kind = KINDS["dit"]
    steps = steps_of(kind, torch.float32, 1, 2)
    module = built(kind, torch.float32)
    with torch.no_grad():
        module.eval()
        losses = [kind.loss(module(**sample_inputs(batch)), batch) for batch in steps[0]]
        module.train()
    with opened(module, kind, steps, tmp_path) as model:
        found = model.evaluate(steps[0], loss=kind.loss)
    assert found == pytest.approx(float(sum(losses)) / sum(len(batch["target"]) for batch in steps[0]), rel=1e-6)


class _Noted(torch.autograd.Function):
    """Notes how the elements of the gradient lie that code before the blocks gets."""

    seen: ClassVar[list[tuple[int, ...]]] = []

    @staticmethod
    def forward(_: object, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(_: object, *gradients: torch.Tensor) -> torch.Tensor:
        _Noted.seen.append(gradients[0].stride())
        return gradients[0]


class Transposed(nn.Module):
    """Hidden states whose elements do not lie in their order, as a convolution of patches makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = _Noted.apply(self.stem(pixels).flatten(2).transpose(1, 2))  # type: ignore[no-untyped-call]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=1))


def test_gradients_lie_as_in_plain_pytorch(tmp_path: Path) -> None:
    """Kernels before the blocks choose by it: on a GPU a convolution rounds otherwise."""
    kind = replace(KINDS["residual"], build=Transposed)
    steps = steps_of(kind, torch.float32, 2, 2)
    _Noted.seen.clear()
    wanted = plain(kind, steps, Recipe(learning_rates=RATES[:2], weight_decay=0.0))
    strides = _Noted.seen.copy()
    _Noted.seen.clear()
    with opened(built(kind, torch.float32), kind, steps, tmp_path) as model:
        model.forward_backward(steps[0], loss=kind.loss)
        _Noted.seen.clear()  # what was tried before the first step
        model.step(learning_rate=RATES[0])
        assert model.forward_backward(steps[1], loss=kind.loss) == wanted.losses[1]
    assert _Noted.seen == strides[2:]
    assert strides[0] == (128, 8, 1)


class Worded(nn.Module):
    """It gets tokens, and is no model of transformers. A part of it is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.unused = nn.Embedding(7, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden @ self.words.weight.T


def test_a_module_of_tokens_is_one_of_samples(tmp_path: Path) -> None:
    """Its weights are those of plain PyTorch, and what it does not use stays as it is."""
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(7, (2, 5), generator=generator) for name in ("input_ids", "target")}
    kind = Kind(Worded, lambda generator: ({}, torch.empty(0)), _next_word, "blocks")
    wanted, module = plain(kind, [[batch]], Recipe(learning_rates=RATES[:1])), built(kind, torch.float32)
    unused = module.unused.weight.detach().clone()  # type: ignore[union-attr, operator]
    with opened(module, kind, [[batch]], tmp_path, weight_decay=0.1) as model:
        assert model.forward_backward(batch, loss=_next_word) == wanted.losses[0]
        model.step(learning_rate=RATES[0])
        model.save_pretrained(tmp_path / "out")
    found = written(tmp_path / "out")
    assert torch.equal(found["unused.weight"], unused)
    assert all(torch.equal(each, wanted.weights[name]) for name, each in found.items())


class Skipping(Normed):
    """What is before the blocks is added behind them."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(pixels)
        return self.head((self.blocks(hidden) + hidden).mean(dim=(2, 3)))


class Growing(Normed):
    """The second block makes more channels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1], self.blocks[2] = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1)


class Overwriting(Normed):
    """A block changes what it gets in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))


class Leaving(nn.Module):
    """What is behind the blocks reads what one of them returns besides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for each in self.blocks:
            each.forward = lambda hidden, each=each: (torch.tanh(hidden @ each.weight), hidden)  # type: ignore[method-assign]

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            pixels, last = each(pixels)
        return pixels + last


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Skipping, r"Skipping: the code after its layers uses what is computed before them from stem\.bias"),
        (NETS["residual"].build, r"its code changes blocks\.0\.inner\.1\.\w+ whenever it runs"),
        (Growing, r"its blocks\.1 makes \[16, 8, 8\] of a sample's \[8, 8, 8\]; blocks must keep the shape"),
        (Leaving, "its layers"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 8)), "has no list of blocks"),
        (lambda: Normed().half(), "only float32 and bfloat16 can be trained"),
    ],
)
def test_a_module_that_cannot_be_streamed_is_rejected(
    tmp_path: Path, build: Callable[[], nn.Module], message: str
) -> None:
    module, kind = build(), KINDS["residual"]
    steps = steps_of(kind, torch.float32, 1, 1)
    if isinstance(module, Leaving):
        steps = [[{"pixels": torch.randn(3, 4), "target": torch.zeros(3)}]]
    with pytest.raises(ratel.RatelError, match=message), opened(module, kind, steps, tmp_path) as model:
        model.forward_backward(steps[0], loss=lambda output, batch: output.sum())


def test_a_block_that_writes_to_what_it_gets_is_rejected(tmp_path: Path) -> None:
    kind = KINDS["residual"]
    steps = steps_of(kind, torch.float32, 1, 1)
    with pytest.raises(ratel.RatelError, match="place"), opened(Overwriting(), kind, steps, tmp_path) as model:
        model.forward_backward(steps[0], loss=kind.loss)


def test_a_module_that_could_not_be_opened_is_as_it_was(tmp_path: Path) -> None:
    kind = KINDS["residual"]
    [[batch]] = steps = steps_of(kind, torch.float32, 1, 1)
    module = built(kind, torch.float32).eval()
    before = module(batch["pixels"])
    with pytest.raises(ratel.RatelError, match="RAM: a step needs"):
        opened(module, kind, steps, tmp_path, limits=ratel.Limits(host_memory="1MiB"))
    assert torch.equal(module(batch["pixels"]), before)
    assert not list(tmp_path.glob("*/*"))


def test_an_open_module_is_the_models_alone(tmp_path: Path) -> None:
    kind = KINDS["residual"]
    [[batch]] = steps = steps_of(kind, torch.float32, 1, 1)
    module = built(kind, torch.float32)
    with (
        opened(module, kind, steps, tmp_path),
        pytest.raises(ratel.RatelError, match="this Normed is open: its weights are on drives"),
    ):
        module(batch["pixels"])
    with pytest.raises(ratel.RatelError, match="this Normed is closed"):
        module(batch["pixels"])


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"pixels": None}, "'pixels' is missing"),
    ({"pixels": torch.zeros(3, 3, 4, 4)}, "give all samples one shape|but the sample's is"),
    ({"pixels": torch.zeros(3, 3, 8, 8).double()}, "torch.float64"),
    ({"target": torch.zeros(2)}, r"'target' is \[2\], but a batch must have"),
    ({"target": 1}, r"a mapping of tensors \[samples, \.\.\]; 'target' is not a dense tensor"),
    ({"pixels": torch.zeros(3, 3, 8, 8).to_sparse()}, "'pixels' is not a dense tensor"),
    ({"pixels": torch.zeros(3, 3, 8, 8, device="meta")}, "'pixels' is not a dense tensor"),
]


def test_a_batch_that_cannot_be_used_is_rejected(tmp_path: Path) -> None:
    kind = KINDS["residual"]
    [[batch]] = steps = steps_of(kind, torch.float32, 1, 1)
    with opened(built(kind, torch.float32), kind, steps, tmp_path) as model:
        for change, message in UNUSABLE:
            wrong = {name: each for name, each in {**batch, **change}.items() if each is not None}
            with pytest.raises(ratel.RatelError, match=message):
                model.forward_backward(wrong, loss=kind.loss)
        with pytest.raises(ratel.RatelError, match="a module needs a loss"):
            model.forward_backward(batch)
        with pytest.raises(ratel.RatelError, match="the sum over the samples of the batch"):
            model.forward_backward(batch, loss=lambda output, batch: output)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample": None}, "a Normed needs a sample of what it gets"),
        ({"sample": {}}, "sample must be a mapping of tensors"),
        ({"dtype": "float32"}, "dtype is for language models"),
        ({"task": "seq2seq"}, "task is for language models"),
        ({"blocks": "layers"}, "Normed has no module 'layers'"),
    ],
)
def test_arguments_that_do_not_fit_a_module_are_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    kind = KINDS["residual"]
    steps = steps_of(kind, torch.float32, 1, 1)
    with pytest.raises(ratel.RatelError, match=message):
        opened(built(kind, torch.float32), kind, steps, tmp_path, **options)


def test_arguments_of_modules_do_not_fit_a_directory(tmp_path: Path) -> None:
    for options, message in (({"blocks": "layers"}, "blocks is for modules"), ({}, "open needs storage")):
        with pytest.raises(ratel.RatelError, match=message):
            ratel.open(tmp_path, storage=[tmp_path] if options else None, **options)
