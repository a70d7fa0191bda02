"""What autograd saves goes to the drives and comes back: gradients have the bits that they have in memory."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

import ratel_cli as ratel
from ratel_cli.engine.cache.saved_tensors import CacheCounts
from ratel_cli.engine.cache.tensor_cache import TensorCache
from ratel_cli.io.buffers import BufferPool
from ratel_cli.io.scratch import Scratch
from ratel_cli.io.tickets import Ticket
from ratel_cli.model.cut.hooked import find_module_blocks
from ratel_cli.sizes import PAGE_BYTES
from tests.library.nets import NETS, NetBatch
from tests.library.test_hook import LEARNING_RATE, assert_same, built, hooked, net_steps, saved, train_plainly
from tests.tiers import pairwise, rotating, thinned

Order = Callable[[nn.Module, str, Sequence[NetBatch]], None]


def one_after_another(model: nn.Module, name: str, batches: Sequence[NetBatch]) -> None:
    for batch in batches:
        NETS[name].loss(model, batch).backward()


def one_forward_one_backward(model: nn.Module, name: str, batches: Sequence[NetBatch]) -> None:
    """As in a pipeline: two micro-batches wait at any time, and the first one's backward comes first."""
    waiting = list[torch.Tensor]()
    for batch in batches:
        waiting.append(NETS[name].loss(model, batch))
        if len(waiting) == 2:
            waiting.pop(0).backward()
    waiting.pop().backward()


def all_forwards_first(model: nn.Module, name: str, batches: Sequence[NetBatch]) -> None:
    for loss in reversed([NETS[name].loss(model, batch) for batch in batches]):
        loss.backward()


@contextmanager
def offloading(model: nn.Module, name: str, directory: Path, **options: object) -> Iterator[CacheCounts]:
    options = {"blocks": NETS[name].blocks, "least_bytes": 1, **options}
    with ratel.offload_activations(model, storage=[directory / "activations"], **options) as counts:  # type: ignore[arg-type]
        yield counts


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


@pytest.mark.parametrize(
    ("name", "dtype", "order", "amount"),
    thinned(
        pairwise(
            list(NETS),
            [torch.float32, torch.bfloat16],
            [one_after_another, one_forward_one_backward, all_forwards_first],
            ["all", "auto", 3000],
        ),
        every=2,
        full_every=2,
    ),
)
def test_gradients_have_the_bits_of_memory(
    tmp_path: Path, name: str, dtype: torch.dtype, order: Order, amount: int | str
) -> None:
    plain = built(name, dtype)
    model = copy.deepcopy(plain)
    [batches] = net_steps(name, 1, 4)
    torch.manual_seed(2)
    order(plain, name, batches)
    torch.manual_seed(2)
    with offloading(model, name, tmp_path, amount=amount) as counts:
        order(model, name, batches)
    assert_same_gradients(model, plain)
    assert counts.written > 0
    assert counts.read + counts.forwarded <= counts.written
    assert not any((tmp_path / "activations").iterdir())


class Checkpointed(nn.Module):
    """A stack whose blocks are checkpointed."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(4)
        )
        self.use_reentrant = use_reentrant

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * torch.ones(1, requires_grad=True)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=self.use_reentrant)
        return hidden.square().mean()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_it_works_around_checkpoints(tmp_path: Path, use_reentrant: bool) -> None:
    """Their inputs go to the drives; what is computed again for backward does not."""
    torch.manual_seed(0)
    plain = Checkpointed(use_reentrant=use_reentrant)
    model = copy.deepcopy(plain)
    hidden = torch.randn(8, 16)
    torch.manual_seed(2)
    plain(hidden).backward()
    torch.manual_seed(2)
    with ratel.offload_activations(
        model, storage=[tmp_path / "activations"], amount="all", least_bytes=1, blocks="layers"
    ) as counts:
        model(hidden).backward()
    assert_same_gradients(model, plain)
    # What the product saves, and the inputs of blocks: that of the last one if it is saved before that block begins.
    assert counts.written == hidden.nbytes * (4 if use_reentrant else 5)


@pytest.mark.parametrize(
    ("name", "order"),
    rotating(["gpt2", "llama", "bert", "t5", "vit", "dit", "residual"], [one_after_another, one_forward_one_backward]),
)
def test_models_that_checkpoint_their_blocks(tmp_path: Path, name: str, order: Order) -> None:
    """Gradients have the bits of the same model in memory, whose blocks are checkpointed or not."""
    plain = built(name)
    checkpointed, model = copy.deepcopy(plain), copy.deepcopy(plain)
    for each in (checkpointed, model):
        for part in each.modules():
            if isinstance(part, PreTrainedModel):
                part.config.use_cache = False  # what a block appends to a cache, it would append twice
        for block in find_module_blocks(each, NETS[name].blocks).values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    [batches] = net_steps(name, 1, 3)
    for each in (plain, checkpointed):
        torch.manual_seed(2)
        order(each, name, batches)
    torch.manual_seed(2)
    with offloading(model, name, tmp_path, amount="all") as counts:
        order(model, name, batches)
    assert_same_gradients(model, checkpointed)
    assert_same_gradients(model, plain)
    assert counts.written > 0


def test_nothing_is_offloaded_by_a_backward(tmp_path: Path) -> None:
    """Which computes all of the module again."""
    plain = built("gpt2")
    model = copy.deepcopy(plain)
    [[batch]] = net_steps("gpt2", 1, 1)

    def loss(module: nn.Module) -> torch.Tensor:
        values = torch.ones(1, requires_grad=True)
        return checkpoint(lambda factor: NETS["gpt2"].loss(module, batch) * factor, values, use_reentrant=True).sum()

    torch.manual_seed(2)
    loss(plain).backward()
    torch.manual_seed(2)
    with offloading(model, "gpt2", tmp_path, amount="all") as counts:
        loss(model).backward()
    assert_same_gradients(model, plain)
    assert counts.written == 0


class Chunks(nn.Module):
    """Blocks that save three views of one tensor, and a view of a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            first, second, third = layer(hidden).chunk(3, dim=-1)
            hidden = first * second.sigmoid() * third
        return hidden.sum()


def test_one_write_for_each_storage_and_none_for_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Chunks(8)
    model, hidden = copy.deepcopy(plain), torch.randn(4, 8)
    plain(hidden).backward()
    with ratel.offload_activations(
        model, storage=[tmp_path / "activations"], amount="all", least_bytes=1, blocks="layers"
    ) as counts:
        model(hidden).backward()
    assert_same_gradients(model, plain)
    # Of two layers: the input, the three chunks in one storage, the gate, and the product of two.
    assert counts.written == 2 * hidden.nbytes * (1 + 3 + 1 + 1)


class _Late:
    """A ticket of a drive that is slow: it is not done before somebody waits."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self.done = False

    @property
    def span(self) -> tuple[float, float]:
        return self._ticket.span

    def wait(self) -> None:
        self.done = True
        self._ticket.wait()


def test_nothing_is_read_from_a_slow_drive(tmp_path: Path) -> None:
    plain = built("gpt2")
    model = copy.deepcopy(plain)
    [batches] = net_steps("gpt2", 1, 2)
    torch.manual_seed(2)
    one_after_another(plain, "gpt2", batches)
    write = Scratch.write_sealed
    torch.manual_seed(2)
    with (
        mock.patch.object(Scratch, "write_sealed", lambda *arguments: _Late(write(*arguments))),
        offloading(model, "gpt2", tmp_path, amount="all") as counts,
    ):
        one_after_another(model, "gpt2", batches)
        assert (counts.read, counts.forwarded) == (0, counts.written)
    assert_same_gradients(model, plain)


def test_what_does_not_find_a_buffer_stays_or_waits(tmp_path: Path) -> None:
    plain = built("gpt2")
    [batches] = net_steps("gpt2", 1, 2)
    torch.manual_seed(2)
    one_after_another(plain, "gpt2", batches)
    write, written = Scratch.write_sealed, {}
    for amount in ("auto", "all"):
        model = built("gpt2")
        torch.manual_seed(2)
        with (
            mock.patch.object(Scratch, "write_sealed", lambda *arguments: _Late(write(*arguments))),
            offloading(model, "gpt2", tmp_path, amount=amount, buffer_bytes=1 << 14) as counts,
        ):
            one_after_another(model, "gpt2", batches)
        written[amount] = counts.written
        assert_same_gradients(model, plain)
    assert 0 < written["auto"] < written["all"]


def test_bytes_that_differ_are_an_error(tmp_path: Path) -> None:
    """However often backward asks for them; and no harm is done to what follows."""
    model = built("sequential")
    [[batch], [other]] = net_steps("sequential", 2, 1)
    plain, written = copy.deepcopy(model), []
    write, begin, caches = Scratch.write_sealed, TensorCache.begin_pass, list[TensorCache]()

    def noted(scratch: Scratch, offset: int, memory: memoryview) -> Ticket:
        written.append((scratch, offset, len(memory)))
        return write(scratch, offset, memory)

    with (
        mock.patch.object(Scratch, "write_sealed", noted),
        mock.patch.object(TensorCache, "begin_pass", lambda cache: caches.append(cache) or begin(cache)),
        offloading(model, "sequential", tmp_path, amount="all", buffer_bytes=PAGE_BYTES),
        BufferPool(None) as pool,
    ):
        loss = NETS["sequential"].loss(model, batch)
        for scratch, offset, num_bytes in written:
            with pool.lease(num_bytes, "test") as lease:
                scratch.read(offset, lease.memory).wait()
                lease.memory[0] ^= 1
                scratch.write(offset, lease.memory).wait()
        for _ in range(2 * len(written)):
            with pytest.raises(ratel.RatelError, match="the bytes read are not the bytes written"):
                loss.backward(retain_graph=True)
        del loss
        model.zero_grad()
        NETS["sequential"].loss(model, other).backward()
        NETS["sequential"].loss(plain, other).backward()
        assert_same_gradients(model, plain)
    assert caches[0]._transfers._pool.leased_bytes == 0


class Changing(nn.Module):
    """Blocks that save a result, which is changed afterwards: itself, or by a view. The last block's is not."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.change = change

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden).exp()
            if layer is not self.layers[-1] and self.change in {"itself", "a view"}:
                (hidden if self.change == "itself" else hidden[:1]).add_(1)
        return hidden.sum()


MODES: list[dict[str, object]] = [
    {"amount": 0},
    {"amount": "all"},
    {"amount": "all", "buffer_bytes": 1},
    {"amount": "auto"},
    {"amount": "all", "host_memory": "64MiB"},
    {"amount": "auto", "host_memory": "64MiB"},
]


def check_changed(
    directory: Path, change: str, options: dict[str, object], device: str | torch.device = "cpu"
) -> CacheCounts:
    """What changes after it was saved is an error, wherever it went."""
    model = Changing(change).to(device)
    rows = torch.randn(4, 8, device=device)
    with ratel.offload_activations(
        model,
        storage=[directory / "activations"],
        least_bytes=1,
        limits=ratel.Limits(host_memory="4GiB"),
        **options,  # type: ignore[arg-type]
    ) as counts:
        loss = model(rows)
        if change == "the input, after forward":
            rows.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    return counts


@pytest.mark.parametrize(("change", "options"), pairwise(["itself", "a view", "the input, after forward"], MODES))
def test_what_is_changed_after_it_was_saved_is_an_error_as_torch_s(
    tmp_path: Path, change: str, options: dict[str, object]
) -> None:
    counts = check_changed(tmp_path, change, options)
    assert (counts.written + counts.resident > 0) == (options["amount"] != 0)


@pytest.mark.parametrize("options", MODES)
def test_what_is_changed_before_it_is_saved_is_none(tmp_path: Path, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(4)))
    model, rows = copy.deepcopy(plain), torch.randn(4, 8)
    plain(rows).sum().backward()
    with ratel.offload_activations(
        model,
        storage=[tmp_path / "activations"],
        least_bytes=1,
        limits=ratel.Limits(host_memory="4GiB"),
        **options,  # type: ignore[arg-type]
    ):
        model(rows).sum().backward()
    assert_same_gradients(model, plain)


def test_a_backward_belongs_inside(tmp_path: Path) -> None:
    model = built("gpt2")
    [[batch]] = net_steps("gpt2", 1, 1)
    with offloading(model, "gpt2", tmp_path, amount="all"):
        loss = NETS["gpt2"].loss(model, batch)
    with pytest.raises(ratel.RatelError, match="comes after its offload_activations has ended"):
        loss.backward()


def test_a_graph_without_backward_gives_its_space_back(tmp_path: Path) -> None:
    model = built("gpt2")
    [batches] = net_steps("gpt2", 1, 4)
    sizes = []
    with offloading(model, "gpt2", tmp_path, amount="all") as counts:
        for batch in batches:
            NETS["gpt2"].loss(model, batch)
            sizes.append(counts.written)
    assert sizes == [sizes[0] * number for number in range(1, 5)]


class Conjugates(nn.Module):
    """Blocks that save views with a conjugate and a negative bit."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
            waves = torch.complex(hidden, hidden.sin())
            hidden = (waves * waves.conj() * waves).imag * waves.conj().imag
        return hidden.square().mean()


def test_conjugates_are_what_they_were(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Conjugates()
    model, hidden = copy.deepcopy(plain), torch.randn(4, 8)
    plain(hidden).backward()
    with ratel.offload_activations(model, storage=[tmp_path / "activations"], amount="all", least_bytes=1) as counts:
        model(hidden).backward()
    assert counts.written > 0
    assert_same_gradients(model, plain)


def test_a_batch_is_not_taken_for_all_data(tmp_path: Path) -> None:
    model = Chunks(8)
    rows = torch.randn(1 << 16, 8)
    with ratel.offload_activations(model, storage=[tmp_path / "activations"], amount="all", least_bytes=1) as counts:
        for first in range(0, 12, 4):
            model(rows[first : first + 4]).backward()
    assert 0 < counts.written < rows.nbytes


def test_graphs_in_circles_may_be_collected_at_any_moment(tmp_path: Path) -> None:
    plain = built("gpt2")
    model = copy.deepcopy(plain)
    [batches] = net_steps("gpt2", 1, 4)
    torch.manual_seed(2)
    one_after_another(plain, "gpt2", batches)
    threshold = gc.get_threshold()
    torch.manual_seed(2)
    try:
        gc.set_threshold(1)
        with offloading(model, "gpt2", tmp_path, amount="all"):
            for batch in batches:
                draws = torch.get_rng_state()
                loss = NETS["gpt2"].loss(model, batch)
                circle: list[object] = [loss]
                circle.append(circle)
                del loss, circle
                torch.set_rng_state(draws)
                NETS["gpt2"].loss(model, batch).backward()
    finally:
        gc.set_threshold(*threshold)
    assert_same_gradients(model, plain)


def test_nothing_is_left_of_what_is_over(tmp_path: Path) -> None:
    model = built("gpt2")
    [batches] = net_steps("gpt2", 1, 4)
    caches = []
    begin = TensorCache.begin_pass
    with (
        mock.patch.object(TensorCache, "begin_pass", lambda cache: caches.append(cache) or begin(cache)),
        offloading(model, "gpt2", tmp_path, amount="all"),
    ):
        one_after_another(model, "gpt2", batches)
        cache = caches[0]
        cache.begin_pass()
        transfers = cache._transfers
        assert (len(cache._measured), len(cache._entries)) == (0, 0)
        assert (len(transfers._live) - len(transfers._storing), transfers._reading_bytes) == (0, 0)
        loss = NETS["gpt2"].loss(model, batches[0])
        for entry in list(transfers._live)[:1]:
            cache._read_ahead(entry.scope)  # reads that nobody waits for
    assert transfers._pool.leased_bytes == 0
    del loss


@pytest.mark.parametrize("options", [{"amount": -5}, {"amount": True}, {"buffer_bytes": 0}, {"least_bytes": -1}])
def test_numbers_that_make_no_sense(tmp_path: Path, options: dict[str, int]) -> None:
    with (
        pytest.raises(ratel.RatelError, match=r"amount must be|buffer_bytes must be"),
        offloading(built("gpt2"), "gpt2", tmp_path, **options),
    ):
        pass


def test_one_module_at_a_time(tmp_path: Path) -> None:
    model = built("gpt2")
    with (
        offloading(model, "gpt2", tmp_path),
        pytest.raises(ratel.RatelError, match="open for another module"),
        offloading(model, "gpt2", tmp_path),
    ):
        pass
    with offloading(model, "gpt2", tmp_path):
        pass


def test_an_amount_that_is_none(tmp_path: Path) -> None:
    with (
        pytest.raises(ratel.RatelError, match="amount must be a number of bytes, 'auto' or 'all', not 'some'"),
        ratel.offload_activations(built("gpt2"), storage=[tmp_path], amount="some"),  # type: ignore[arg-type]
    ):
        pass


@pytest.mark.parametrize("name", ["gpt2", "t5", "dit"])
def test_inputs_of_hooked_blocks_are_offloaded(tmp_path: Path, name: str) -> None:
    plain = built(name)
    model = copy.deepcopy(plain)
    [batches] = net_steps(name, 1, 3)
    torch.manual_seed(2)
    train_plainly(name, plain, [[batch] for batch in batches])
    torch.manual_seed(2)
    with hooked(name, model, tmp_path) as state:
        ratel.AdamW(model, lr=LEARNING_RATE)
        with offloading(model, name, tmp_path, amount="all") as counts:
            for batch in batches:
                NETS[name].loss(model, batch).backward()
        assert counts.written > 0
        assert_same(saved(state, tmp_path), plain)
