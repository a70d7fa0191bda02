"""A hooked module of any kind trains in a loop of one's own as plain PyTorch trains it."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments

import ratel_cli as ratel
from tests.library.nets import NETS, NetBatch
from tests.reference import Recipe, Trained, train_module
from tests.store.stores import flip_in
from tests.tiers import pairwise, thinned

ROOT = Path(__file__).parents[2]
DTYPES = [torch.float32, torch.bfloat16]
LEARNING_RATE = 1e-2
"""At which every parameter changes in bf16."""


def net_steps(name: str, number: int, num_rounds: int) -> list[list[NetBatch]]:
    generator = torch.Generator().manual_seed(number)
    return [[NETS[name].batch(generator) for _ in range(num_rounds)] for _ in range(number)]


def built(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        return NETS[name].build().to(dtype).train()


def wanted(name: str, model: nn.Module, steps: Sequence[Sequence[NetBatch]], recipe: Recipe) -> Trained:
    """The same loop on the module itself, which is in memory."""
    model.to(recipe.device)
    if isinstance(model, PreTrainedModel):
        model.tie_weights()  # on devices that torch does not know, `to` separates tied weights
    weights = {each: parameter.detach().cpu().clone() for each, parameter in model.named_parameters()}
    torch.manual_seed(3)
    return train_module(
        model, lambda batch: NETS[name].loss(model, batch), weights, steps, recipe, decayed=list(weights)
    )


@contextmanager
def hooked(name: str, model: nn.Module, directory: Path) -> Iterator[ratel.Hooked]:
    net = NETS[name]
    with ratel.hook(model, storage=[directory / "state"], blocks=net.blocks, outside=net.outside) as state:
        yield state


def run(name: str, model: nn.Module, steps: Sequence[Sequence[NetBatch]], state: ratel.Hooked) -> Trained:
    """The loop: no step() is called."""
    losses, norms = [], []
    for step in steps:
        total = 0.0
        for batch in step:
            loss = NETS[name].loss(model, batch)
            (loss / len(step)).backward()
            total += float(loss.detach())
        losses.append(total / len(step))
        norms.append(state.grad_norm)
    return Trained(losses=tuple(losses), norms=tuple(norms), parameter_norms=(), weights={})


def saved(state: ratel.Hooked, directory: Path) -> dict[str, torch.Tensor]:
    state.save(directory / "out", overwrite=True)
    [path] = (directory / "out").glob("*.safetensors")  # diffusers has a name of its own for it
    return load_file(path)


def assert_same(found: dict[str, torch.Tensor], model: nn.Module) -> None:
    """`model`: plain PyTorch's after training; parameters and buffers are equal bit for bit."""
    state = model.state_dict()
    assert found.keys() == {name for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in state}
    for name, each in found.items():
        assert torch.equal(each, state[name]), name


def train_plainly(name: str, model: nn.Module, steps: Sequence[Sequence[NetBatch]]) -> None:
    """In memory, by torch's AdamW."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=LEARNING_RATE)
    for step in steps:
        for batch in step:
            NETS[name].loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "dtype", "num_rounds", "max_grad_norm"),
    thinned(pairwise(list(NETS), DTYPES, [1, 3], [None, 0.5]), every=3, full_every=2),
)
def test_it_trains_as_plain_pytorch_does(
    tmp_path: Path, name: str, dtype: torch.dtype, num_rounds: int, max_grad_norm: float | None
) -> None:
    plain = built(name, dtype)
    model, before = copy.deepcopy(plain), copy.deepcopy(plain)
    steps = net_steps(name, 5, num_rounds)
    recipe = Recipe(dtype=dtype, learning_rate=LEARNING_RATE, weight_decay=0.1, max_grad_norm=max_grad_norm)
    trained = wanted(name, plain, steps, recipe)
    torch.manual_seed(3)
    with hooked(name, model, tmp_path) as state:
        ratel.AdamW(
            model, lr=LEARNING_RATE, weight_decay=0.1, max_grad_norm=max_grad_norm, accumulation_steps=num_rounds
        )
        found = run(name, model, steps, state)
        assert (found.losses, found.norms) == (trained.losses, trained.norms)
        assert_same(saved(state, tmp_path), plain)
    for each, parameter in before.named_parameters():
        is_frozen = not parameter.requires_grad  # as the table of positions that Whisper's own code makes
        assert torch.equal(parameter, plain.get_parameter(each)) is is_frozen, each


def test_the_program_of_the_paper_runs_as_printed(tmp_path: Path) -> None:
    """Ratel, Fig. 4, but for names; it has no `optimizer.step()`."""

    class Model(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                data = torch.tanh(layer(data))
            return data

    config, num_epochs = 16, 2
    generator = torch.Generator().manual_seed(0)
    train_loader = [tuple(torch.randn(2, 4, config, generator=generator)) for _ in range(3)]
    torch.manual_seed(0)
    with ratel.init(storage=[tmp_path / "state"]):
        model = Model(config)
        state = ratel.hook(model)
    torch.manual_seed(0)
    plain = Model(config)
    adam = torch.optim.Adam(plain.parameters())
    criterion = nn.MSELoss()

    ratel.Optimizer(torch.optim.Adam(model.parameters()))
    for _ in range(num_epochs):
        for data, target in train_loader:
            output = model(data)
            loss = criterion(output, target)
            loss.backward()

            adam.zero_grad()
            wanted_loss = criterion(plain(data), target)
            wanted_loss.backward()
            adam.step()
            assert torch.equal(loss, wanted_loss)
    with state:
        assert_same(saved(state, tmp_path), plain)


Loop = Callable[[nn.Module, torch.optim.Optimizer, Sequence[NetBatch]], None]


def two_losses(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[NetBatch]) -> None:
    """Of one graph: blocks have several calls in one backward."""
    first, second = (NETS["gpt2"].loss(model, batch) for batch in batches[:2])
    (first + 0.5 * second).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[NetBatch]) -> None:
    """Of two forwards that come before them, the first forward's first."""
    losses = [NETS["gpt2"].loss(model, batch) for batch in batches[:2]]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated_between(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[NetBatch]) -> None:
    optimizer.zero_grad()
    loss = NETS["gpt2"].loss(model, batches[0])
    with torch.no_grad():
        model.eval()
        NETS["gpt2"].loss(model, batches[1])
        model.train()
    loss.backward()
    optimizer.step()


def a_closure(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[NetBatch]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = NETS["gpt2"].loss(model, batches[0])
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)


def an_output_is_not_used(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[NetBatch]) -> None:
    """The graph of one forward has no backward, and is gone when the step ends."""
    NETS["gpt2"].loss(model, batches[1])
    loss = NETS["gpt2"].loss(model, batches[0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def autocast(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[NetBatch]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = NETS["gpt2"].loss(model, batches[0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop", [two_losses, two_backwards, evaluated_between, a_closure, an_output_is_not_used, autocast]
)
def test_any_loop_is_that_of_plain_pytorch(tmp_path: Path, loop: Loop) -> None:
    plain = built("gpt2")
    model = copy.deepcopy(plain)
    steps = net_steps("gpt2", 4, 2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(2)
    for step in steps:
        loop(plain, optimizer, step)
    torch.manual_seed(2)
    with hooked("gpt2", model, tmp_path) as state:
        mine = ratel.AdamW(model, lr=LEARNING_RATE)
        for step in steps:
            loop(model, mine, step)
        assert state.num_steps == len(steps)
        assert_same(saved(state, tmp_path), plain)


def test_a_graph_may_be_retained(tmp_path: Path) -> None:
    plain = built("t5")
    model = copy.deepcopy(plain)
    [[batch]] = net_steps("t5", 1, 1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(2)
    loss = NETS["t5"].loss(plain, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    torch.manual_seed(2)
    with hooked("t5", model, tmp_path) as state:
        ratel.AdamW(model, lr=LEARNING_RATE, accumulation_steps=2)
        loss = NETS["t5"].loss(model, batch)
        loss.backward(retain_graph=True)
        assert state.num_steps == 0
        loss.backward()
        assert state.num_steps == 1
        assert_same(saved(state, tmp_path), plain)


def test_groups_and_schedulers_are_those_of_torch(tmp_path: Path) -> None:
    plain = built("bert")
    model = copy.deepcopy(plain)

    def groups(module: nn.Module) -> list[dict[str, object]]:
        decayed = {name: "bias" not in name and "LayerNorm" not in name for name, _ in module.named_parameters()}
        return [
            {
                "params": [each for name, each in module.named_parameters() if decayed[name] == does],
                "weight_decay": rate,
            }
            for does, rate in ((True, 0.2), (False, 0.0))
        ]

    def loop(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
        for [batch] in net_steps("bert", 4, 1):
            NETS["bert"].loss(module, batch).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    torch.manual_seed(2)
    loop(plain, torch.optim.AdamW(groups(plain), lr=LEARNING_RATE, betas=(0.8, 0.95), eps=1e-6))
    torch.manual_seed(2)
    with hooked("bert", model, tmp_path) as state:
        loop(model, ratel.AdamW(groups(model), lr=LEARNING_RATE, betas=(0.8, 0.95), eps=1e-6))
        assert_same(saved(state, tmp_path), plain)


def bert_rows() -> list[dict[str, torch.Tensor]]:
    """16 rows, as a loader takes them."""
    return [
        {**{name: each[row] for name, each in batch.inputs.items()}, "labels": batch.target[row]}
        for [batch] in net_steps("bert", 8, 1)
        for row in range(2)
    ]


@pytest.mark.parametrize("max_grad_norm", thinned([0.0, 1e6], every=2, offset=1))
def test_the_trainer_of_transformers_trains_it(tmp_path: Path, max_grad_norm: float) -> None:
    """With gradient accumulation, a scheduler, and norms in its log."""
    plain = built("bert")
    model = copy.deepcopy(plain)
    rows = bert_rows()

    def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
        arguments = TrainingArguments(
            str(tmp_path / "trainer"), per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=1,
            report_to=[], save_strategy="no", max_grad_norm=max_grad_norm, use_cpu=True, logging_steps=1,
            disable_tqdm=True,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)
        trainer = Trainer(module, arguments, train_dataset=rows, optimizers=(optimizer, schedule))
        trainer.train()
        return [{name: row[name] for name in ("loss", "grad_norm")} for row in trainer.state.log_history[:-1]]

    log = train(plain, torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE))
    with hooked("bert", model, tmp_path) as state:
        assert train(model, ratel.AdamW(model, lr=LEARNING_RATE, accumulation_steps=2)) == log
        assert state.num_steps == len(log) == 4
        assert_same(saved(state, tmp_path), plain)


@pytest.fixture
def _accelerate_begins_anew() -> Iterator[None]:
    """What accelerate knows of its process: the device, and how many rounds a step has."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("_accelerate_begins_anew")
@pytest.mark.parametrize(("num_rounds", "max_grad_norm"), [(1, None), (2, 0.5)])
def test_a_loop_of_accelerate_trains_it(tmp_path: Path, num_rounds: int, max_grad_norm: float | None) -> None:
    """Without a launcher: it prepares module, loader, optimizer and scheduler, and counts the rounds of a step."""
    plain = built("bert")
    model, loader = copy.deepcopy(plain), DataLoader(bert_rows(), batch_size=2)  # type: ignore[arg-type]
    losses, norms, found = [], [], []

    def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)

    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    scheduler = scheduled(optimizer)
    torch.manual_seed(2)
    for number, batch in enumerate(loader, start=1):
        loss = plain(**batch).loss
        losses.append(loss.detach())
        (loss / num_rounds).backward()
        if number % num_rounds == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), max_grad_norm or torch.inf)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    torch.manual_seed(2)
    with hooked("bert", model, tmp_path) as state:
        mine = ratel.AdamW(model, lr=LEARNING_RATE, max_grad_norm=max_grad_norm, accumulation_steps=num_rounds)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=num_rounds)
        prepared = accelerator.prepare(model, loader, mine, scheduled(mine))
        for batch in prepared[1]:
            with accelerator.accumulate(prepared[0]):
                loss = prepared[0](**batch).loss
                accelerator.backward(loss)
                for each in prepared[2:]:
                    each.step()
                prepared[2].zero_grad()
            found.append(loss.detach())
            if accelerator.sync_gradients:
                assert state.grad_norm == norms[state.num_steps - 1]
        assert state.num_steps == len(norms) == 8 // num_rounds
        assert torch.equal(torch.stack(found), torch.stack(losses))
        assert_same(saved(state, tmp_path), plain)


@pytest.mark.usefixtures("_accelerate_begins_anew")
def test_what_accelerate_would_clip_is_an_error(tmp_path: Path) -> None:
    """If the norm is larger: a smaller one is only read, as `Trainer` reads it for its log."""
    model = built("bert")
    [[batch]] = net_steps("bert", 1, 1)
    accelerator = Accelerator(cpu=True)
    with hooked("bert", model, tmp_path) as state:
        ratel.AdamW(model, lr=LEARNING_RATE)
        accelerator.backward(NETS["bert"].loss(model, batch))
        norm = accelerator.clip_grad_norm_(model.parameters(), 1e6)
        assert norm is not None and float(norm) == state.grad_norm
        with pytest.raises(ratel.RatelError, match=r"with its update, not in \.grad"):
            accelerator.clip_grad_norm_(model.parameters(), 1e-3)


def test_only_what_is_outside_may_be_trained(tmp_path: Path) -> None:
    plain = built("bert")
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("encoder" not in name)
    model = copy.deepcopy(plain)
    with hooked("bert", model, tmp_path) as state:
        ratel.AdamW(model, lr=LEARNING_RATE)
        torch.manual_seed(2)
        for [batch] in net_steps("bert", 3, 1):
            NETS["bert"].loss(model, batch).backward()
        assert state.num_steps == 3
        torch.manual_seed(2)
        train_plainly("bert", plain, net_steps("bert", 3, 1))
        assert_same(saved(state, tmp_path), plain)


class Odd(nn.Module):
    """Blocks with weights among their results, complex ones, one tensor as several inputs, and buffers that they use
    and change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Odd(16) for _ in range(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        others = list[torch.Tensor]()
        for layer in self.layers:
            hidden, spectrum, query = layer(hidden, hidden, same=hidden)
            others += [spectrum, query]  # used when the weights of this layer are gone
        return hidden.square().mean() + torch.stack([each.abs().mean() for each in others]).sum()


class _Odd(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(width))
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.register_buffer("mean", torch.zeros(width))

    def forward(
        self, hidden: torch.Tensor, again: torch.Tensor, *, same: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.mean(dim=(0, 1)), alpha=0.1)
        attended, _ = self.attention(hidden, again, same)
        hidden = hidden + torch.tanh(self.linear(attended - self.mean))
        return hidden, torch.fft.rfft(hidden.float(), dim=1), self.query.expand(2, -1)


def test_odd_blocks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Odd()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LEARNING_RATE)
    batches = torch.randn(3, 2, 6, 16)
    for batch in batches:
        plain(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with ratel.hook(model, storage=[tmp_path / "state"]) as state:
        ratel.AdamW(model, lr=LEARNING_RATE)
        for batch in batches:
            loss = model(batch)
            model.eval()  # what forward has computed with counts
            loss.backward()
            model.train()
        assert_same(saved(state, tmp_path), plain)
        with torch.no_grad():
            assert torch.equal(model.eval()(batches[0]), plain.eval()(batches[0]))


def test_a_closed_module_is_hooked_again(tmp_path: Path) -> None:
    plain = built("llama")
    model = copy.deepcopy(plain)
    train_plainly("llama", plain, net_steps("llama", 2, 1))
    for [batch] in net_steps("llama", 2, 1):
        with hooked("llama", model, tmp_path) as state:
            ratel.AdamW(model, lr=LEARNING_RATE)
            NETS["llama"].loss(model, batch).backward()
            found = saved(state, tmp_path)
        assert "forward" not in vars(model.model.layers[0]) and "state_dict" not in vars(model)
    assert_same(found, plain)


@pytest.mark.full
def test_a_program_that_ends_without_closing_loses_nothing(tmp_path: Path) -> None:
    """As that of the paper does."""
    program = (
        "import sys, ratel_cli as ratel\n"
        "from tests.library.test_hook import NETS, built, net_steps\n"
        "model = built('llama')\n"
        "state = ratel.hook(model, storage=[sys.argv[1]])\n"
        "ratel.AdamW(model, lr=1e-2)\n"
        "for [batch] in net_steps('llama', 3, 1):\n"
        "    NETS['llama'].loss(model, batch).backward()\n"
    )
    for _ in range(3):
        command = [sys.executable, "-c", program, str(tmp_path / "state")]
        found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (found.returncode, "Traceback" in found.stderr) == (0, False), found.stderr
    with hooked("llama", built("llama"), tmp_path) as state:
        assert state.num_steps == 9


def test_a_step_that_is_dropped_changes_nothing(tmp_path: Path) -> None:
    plain = built("gpt2")
    model = copy.deepcopy(plain)
    steps = net_steps("gpt2", 3, 2)
    torch.manual_seed(2)
    train_plainly("gpt2", plain, steps)
    with hooked("gpt2", model, tmp_path) as state:
        mine = ratel.AdamW(model, lr=LEARNING_RATE, accumulation_steps=2)
        NETS["gpt2"].loss(model, steps[0][1]).backward()
        mine.zero_grad()
        torch.manual_seed(2)
        run_summed(model, steps[:2])
        NETS["gpt2"].loss(model, steps[0][0]).backward()
        model.zero_grad()
        torch.manual_seed(2)
        for batch in (*steps[0], *steps[1]):
            with torch.no_grad():
                NETS["gpt2"].loss(model, batch)  # the same draws
        run_summed(model, steps[2:])
        assert state.num_steps == 3
        assert_same(saved(state, tmp_path), plain)


def run_summed(model: nn.Module, steps: Sequence[Sequence[NetBatch]]) -> None:
    for step in steps:
        for batch in step:
            NETS["gpt2"].loss(model, batch).backward()


def test_it_resumes_whatever_the_module_has(tmp_path: Path) -> None:
    plain, model = built("t5"), built("t5")
    steps = net_steps("t5", 4, 1)
    trained = wanted("t5", plain, steps, Recipe(learning_rate=LEARNING_RATE, weight_decay=0.1))
    torch.manual_seed(3)
    with hooked("t5", model, tmp_path) as state:
        ratel.AdamW(model, lr=LEARNING_RATE, weight_decay=0.1)
        first = run("t5", model, steps[:2], state)
    draws = torch.get_rng_state()
    again = NETS["t5"].build()
    torch.set_rng_state(draws)
    with hooked("t5", again.train(), tmp_path) as state:
        assert state.num_steps == 2
        ratel.AdamW(again, lr=LEARNING_RATE, weight_decay=0.1)
        second = run("t5", again, steps[2:], state)
        assert first.losses + second.losses == trained.losses
        assert_same(saved(state, tmp_path), plain)


@pytest.mark.full
def test_after_a_crash_it_is_at_most_one_step_behind(tmp_path: Path) -> None:
    program = (
        "import os, sys, torch, ratel_cli as ratel\n"
        "from tests.library.test_hook import NETS, built, net_steps\n"
        "model = built('llama')\n"
        "state = ratel.hook(model, storage=[sys.argv[1]])\n"
        "ratel.AdamW(model, lr=1e-2)\n"
        "for [batch] in net_steps('llama', 5, 1)[state.num_steps:]:\n"
        "    NETS['llama'].loss(model, batch).backward()\n"
        "    print(state.num_steps, flush=True)\n"
        "    if state.num_steps == int(sys.argv[2]): os._exit(9)\n"
        "state.save(sys.argv[3])\n"
    )
    counts = []
    for number, stop in enumerate((2, 4, 0)):
        arguments = [str(tmp_path / "state"), str(stop), str(tmp_path / "out")]
        command = [sys.executable, "-c", program, *arguments]
        found = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert found.returncode == (9 if number < 2 else 0), found.stderr
        counts.append([int(line) for line in found.stdout.split()])
    assert counts[0] == [1, 2] and counts[1][0] in (2, 3) and counts[2][0] in (4, 5) and counts[2][-1] == 5
    plain = built("llama")
    train_plainly("llama", plain, net_steps("llama", 5, 1))
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), plain)


def test_generation_uses_the_cache(tmp_path: Path) -> None:
    plain = built("gpt2").eval()
    model = copy.deepcopy(plain)
    prompt = torch.arange(3, 8).unsqueeze(0)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with hooked("gpt2", model, tmp_path):
        assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


def test_what_it_costs_is_explained(tmp_path: Path) -> None:
    model = built("gpt2")
    with hooked("gpt2", model, tmp_path) as state:
        text = ratel.explain(state)
        assert "GPT2LMHeadModel: 11.4K parameters in 3 blocks" in text
        assert "8.00 KiB of weights stay in memory" in text
        assert "sums" not in text
        ratel.AdamW(model, accumulation_steps=2)
        assert "for gradients of several rounds" in ratel.explain(state)


@pytest.mark.parametrize("max_grad_norm", [None, 1e6])
@pytest.mark.parametrize("name", ["llama", "sequential"])
def test_a_step_moves_what_was_planned(tmp_path: Path, name: str, max_grad_norm: float | None) -> None:
    """Bytes to and from the drives of a later step, which nothing clips: the first one reads what stays in memory."""
    model = built(name)
    moved = []
    with hooked(name, model, tmp_path) as state:
        ratel.AdamW(model, lr=LEARNING_RATE, max_grad_norm=max_grad_norm)
        queue = state._context.queue
        for [batch] in net_steps(name, 5, 1):
            before = queue.read_bytes, queue.written_bytes
            NETS[name].loss(model, batch).backward()
            state._settle()
            moved.append((queue.read_bytes - before[0], queue.written_bytes - before[1]))
        traffic = state.plan.traffic
    assert moved[3:] == [(traffic.read_bytes, traffic.written_bytes)] * 2


def test_a_state_that_is_damaged_is_found(tmp_path: Path) -> None:
    model = built("llama")
    with hooked("llama", model, tmp_path) as state:
        state.verify()
        flip_in(tmp_path / "state", model.lm_head.weight.detach().numpy().tobytes()[:64])
        with pytest.raises(ratel.RatelError, match="are not what step 0 wrote"):
            state.verify()
