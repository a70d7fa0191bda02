"""The tape drops what backward does not need, holds what it does, and detects a forward that does not repeat."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import numpy
import numpy.typing
import pytest
import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from ratel_cli.engine.replay.repeating import Template, Unrepeated, repeater_of, template_of
from ratel_cli.engine.replay.tape import Recorder, Replayer, Tape, Tapes
from ratel_cli.errors import RatelError
from ratel_cli.planning.profile.liveness import Decision

ATTENTION = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
Block = Callable[[torch.Tensor], torch.Tensor]
Offloaded = dict[int, tuple[torch.Tensor, ...]]
WHICH = torch.tensor([2])
"""What a layer gets, and may read past the dispatcher."""


def recorded(
    block: Block, hidden: torch.Tensor, swapped: Sequence[str] = ()
) -> tuple[torch.Tensor, Recorder, Tape, Offloaded]:
    recorder = Recorder(swapped=swapped)
    with recorder.recording():
        output = block(hidden.detach().requires_grad_())
    return output.detach(), recorder, *recorder.finish()


def record(block: Block, hidden: torch.Tensor) -> tuple[torch.Tensor, Tape]:
    output, _, tape, offloaded = recorded(block, hidden)
    assert not offloaded
    return output, tape


def gradients(
    block: Block, hidden: torch.Tensor, parameters: list[nn.Parameter], tape: Tape | None
) -> list[torch.Tensor]:
    leaf = hidden.detach().requires_grad_()
    if tape is None:
        output = block(leaf)
    else:
        with Replayer(tape) as replayer:
            output = block(leaf)
        replayer.check_complete()
    torch.manual_seed(9)
    return list(torch.autograd.grad(output, [leaf, *parameters], torch.randn_like(output)))


def executed(tape: Tape) -> list[str]:
    return [str(func) for func, decision in zip(tape.funcs, tape.decisions, strict=True) if decision is Decision.EXEC]


def dead(tape: Tape) -> list[str]:
    return [str(func) for func, decision in zip(tape.funcs, tape.decisions, strict=True) if decision is Decision.DEAD]


@pytest.fixture
def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]


@pytest.fixture
def hidden() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 8)


def check(block: Block, hidden: torch.Tensor, parameters: list[nn.Parameter]) -> Tape:
    """Check that gradients through the tape are those without it. Returns the tape."""
    torch.manual_seed(3)
    output, tape = record(block, hidden)
    torch.manual_seed(3)
    wanted = gradients(block, hidden, parameters, None)
    torch.manual_seed(1234)  # the replay must not depend on the generator's state
    found = gradients(block, hidden, parameters, tape)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    torch.manual_seed(3)
    assert torch.equal(output, block(hidden))
    check_repeated(block, hidden, tape)
    return tape


def recorded_template(block: Block, hidden: torch.Tensor, swapped: Sequence[str] = ()) -> Template | None:
    _, recorder, tape, _ = recorded(block, hidden, swapped)
    return template_of(recorder, tape)


def repeat(template: Template, block: Block, hidden: torch.Tensor) -> tuple[torch.Tensor, Tape, Offloaded]:
    repeater = repeater_of(template)
    with repeater.recording():
        output = block(hidden.detach().requires_grad_())
    return output.detach(), *repeater.finish()


def check_repeated(block: Block, hidden: torch.Tensor, wanted: Tape) -> None:
    """Check that a unit that repeats another one has the tape that it would have if it were recorded."""
    torch.manual_seed(1)
    template = recorded_template(block, hidden)
    if template is None:
        return
    torch.manual_seed(3)
    _, found, offloaded = repeat(template, block, hidden)
    assert (found.funcs, found.decisions, found.outputs) == (wanted.funcs, wanted.decisions, wanted.outputs)
    assert found.random_states.keys() == wanted.random_states.keys() and not offloaded
    assert all(torch.equal(state, wanted.random_states[each]) for each, state in found.random_states.items())


def test_a_unit_that_is_repeated_keeps_outputs_and_no_graph(weights: list[nn.Parameter]) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout((x @ weights[0]).tanh(), 0.5) @ weights[1]

    rows, others = torch.randn(5, 8), torch.randn(5, 8)
    template = recorded_template(block, rows, ["aten.tanh.default#0"])
    assert template is not None
    torch.manual_seed(3)
    output, tape, offloaded = repeat(template, block, others)
    torch.manual_seed(3)
    assert torch.equal(output, block(others))
    [(position, (kept,))] = offloaded.items()
    assert tape.decisions[position] is Decision.SWAP and not kept.requires_grad
    assert torch.equal(kept, (others @ weights[0]).tanh())
    assert template.swapped_bytes == {position: 256}
    leaf = others.clone().requires_grad_()
    with Replayer(tape, dict(offloaded)) as replayer:
        again = block(leaf)
    replayer.check_complete()
    torch.manual_seed(3)
    plain = others.clone().requires_grad_()
    wanted = torch.autograd.grad(block(plain).sum(), [plain, *weights[:2]])
    found = torch.autograd.grad(again.sum(), [leaf, *weights[:2]])
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w: (x @ w).exp(),
        lambda x, w: x @ w,
        lambda x, w: (x @ w).tanh().tanh(),
        lambda x, w: (x[:2] @ w).tanh(),
        lambda x, w: (x.double() @ w.double()).tanh(),
        lambda x, w: (x @ w.t().contiguous().t()).tanh(),
    ],
    ids=["operator", "end", "more", "shape", "dtype", "before"],
)
def test_what_is_not_repeated_is_noticed(
    weights: list[nn.Parameter], other: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    rows = torch.randn(5, 8)
    template = recorded_template(lambda x: (x @ weights[0]).tanh(), rows, ["aten.tanh.default#0"])
    assert template is not None
    with pytest.raises(Unrepeated):
        repeat(template, lambda x: other(x, weights[0]), rows)
    repeat(template, lambda x: (x @ weights[1]).tanh(), rows)


def test_where_nothing_is_noted_the_replay_alone_checks(weights: list[nn.Parameter]) -> None:
    rows = torch.randn(5, 8)
    template = recorded_template(lambda x: (x @ weights[0]).tanh(), rows)
    assert template is not None and not template.needs_watching
    _, tape, offloaded = repeat(template, lambda x: (x @ weights[0]).tanh(), rows)
    assert (tape.funcs, tape.outputs, offloaded) == (template.funcs, template.outputs, {})
    repeat(template, lambda x: (x @ weights[0]).exp(), rows)  # unseen here
    with Replayer(tape), pytest.raises(RatelError, match="recomputing did not repeat the forward pass"):
        (rows.clone().requires_grad_() @ weights[0]).exp()


@pytest.mark.parametrize(
    "block",
    [lambda x: functional.dropout(x, 0.5), lambda x: (x * 2).add_(1), lambda x: (x * 2).tanh()],
    ids=["draws", "mutates", "offloads"],
)
def test_what_needs_watching(block: Block) -> None:
    template = recorded_template(block, torch.randn(3, 3), ["aten.tanh.default#0"])
    assert template is not None and template.needs_watching


def test_strides_are_shapes_too(weights: list[nn.Parameter]) -> None:
    template = recorded_template(lambda x: x.tanh() @ weights[0], torch.randn(8, 8), ["aten.tanh.default#0"])
    assert template is not None
    with pytest.raises(Unrepeated):
        repeat(template, lambda x: x.tanh() @ weights[0], torch.randn(8, 8).t())


def test_a_models_own_code_does_not_catch_it(weights: list[nn.Parameter]) -> None:
    template = recorded_template(lambda x: x.tanh() @ weights[0], torch.randn(8, 8), ["aten.tanh.default#0"])
    assert template is not None

    def block(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.exp() @ weights[0]
        except Exception:  # noqa: BLE001
            return x.tanh() @ weights[0]

    with pytest.raises(Unrepeated):
        repeat(template, block, torch.randn(8, 8))


@pytest.mark.parametrize(
    "block",
    [
        lambda x: x * 2 if float(x.detach().sum()) > 1e9 else x * 3,
        lambda x: x[x.argmax(-1)],
        lambda x: x.masked_fill(x > 0, 0.0),
        lambda x: x[: WHICH.tolist()[0]] * 2,
        lambda x: x[: int(WHICH.numpy()[0])] * 2,
        lambda x: x[: int(numpy.asarray(WHICH)[0])] * 2,
    ],
    ids=["a number", "indices", "a mask", "a list", "an array", "as an array"],
)
def test_what_may_take_another_course_is_recorded_each_time(block: Block) -> None:
    assert recorded_template(block, torch.randn(3, 3)) is None


def test_tensors_read_values_as_before() -> None:
    methods = {name: getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")}
    recorded_template(lambda x: x * 2, torch.randn(3, 3))
    assert {name: getattr(torch.Tensor, name) for name in methods} == methods


def test_so_is_what_runs_without_gradients() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        return x * scale

    assert recorded_template(block, torch.randn(3, 3)) is None


def test_the_last_product_and_residual_add_are_dead(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(x @ weights[0]) @ weights[1]

    tape = check(block, hidden, weights[:2])
    assert [name for name in executed(tape) if "mm" in name] == ["aten.mm.default"]
    assert [name for name in dead(tape) if "view" not in name] == ["aten.mm.default", "aten.add.Tensor"]


def test_nothing_is_dead_when_all_is_saved(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    tape = check(lambda x: torch.exp(torch.tanh(x @ weights[0])), hidden, weights[:1])
    assert [name for name in dead(tape) if "mm" not in name] == []


def test_a_chain_that_only_adds_is_dead(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    tape = check(lambda x: (x + 1 - x * 2 + 3) @ weights[0] + 5, hidden, weights[:1])
    assert executed(tape).count("aten.mm.default") == 0


def test_in_place_and_views(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        y = (x @ weights[0]).clone()
        y[:, 0] = 0
        y.mul_(2).add_(1)
        left, right = y[..., :4], y[..., 4:].clone()
        z = torch.cat([left.transpose(0, 1).transpose(0, 1) * 3, right.exp_()], dim=-1)
        return z @ weights[1]

    check(block, hidden, weights[:2])


def test_what_changes_later_is_not_offloaded(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    """A replay that got the changed values would change them once more."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return (x @ weights[0]).mul_(2) @ weights[1]

    rows = hidden[0]
    *_, tape, offloaded = recorded(block, rows, ["aten.mm.default#0"])
    assert offloaded == {}
    wanted, found = (gradients(block, rows, weights[:2], each) for each in (None, tape))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("used", [True, False])
def test_random_operators_draw_again_what_they_drew(
    weights: list[nn.Parameter], hidden: torch.Tensor, used: bool
) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(x @ weights[0], 0.5)
        noise = torch.rand(5, 8)
        z = functional.dropout(y, 0.3) @ weights[1]
        return z * noise if used else z + noise

    check(block, hidden, weights[:2])


def test_routing_by_values(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    """Indices come from products that no gradient needs. They decide what runs, so they must be computed."""

    def block(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            chosen = (x @ weights[2]).sum(-1).argmax(-1)
        counts = torch.bincount(chosen, minlength=5).tolist()
        parts = [x[:, index] * (count + 1) for index, count in enumerate(counts)]
        return torch.stack(parts, 1) @ weights[0]

    check(block, hidden, weights[:1])


class _Hidden(torch.autograd.Function):
    """Saves a tensor on its context, where no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.saved = x * 2
        return ctx.saved.sin()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved


def test_what_a_custom_function_saves_for_itself_is_computed(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    check(lambda x: _Hidden.apply(x @ weights[0]) + 1, hidden, weights[:1])


def test_a_recording_saves_no_activation(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    output, _ = record(lambda x: torch.tanh(torch.tanh(x @ weights[0]) @ weights[1]), hidden)
    assert output.grad_fn is None
    recorder = Recorder()
    with recorder.recording():
        result = torch.tanh(hidden.requires_grad_() @ weights[0])
    with pytest.raises(RatelError, match="the recorded forward's graph"):
        result.sum().backward()


def test_another_forward_is_rejected(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    _, tape = record(lambda x: torch.tanh(x @ weights[0]), hidden)
    with pytest.raises(RatelError, match=r"did not repeat the forward pass: operator \d+ was aten.tanh"):
        gradients(lambda x: torch.sin(x @ weights[0]), hidden, [weights[0]], tape)
    with pytest.raises(RatelError, match="was the end"):
        gradients(lambda x: torch.tanh(x @ weights[0]).sin(), hidden, [weights[0]], tape)
    with pytest.raises(RatelError, match="is now the end"):
        gradients(lambda x: x @ weights[0], hidden, [weights[0]], tape)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.1, True)[0]
    return output


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.1)[0]
    return output


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True, 0.1)[0]
    return output


@pytest.mark.parametrize("attend", [_flash, _efficient, _cudnn])
def test_attention_on_a_gpu_is_swapped_whole(attend: Callable[..., torch.Tensor]) -> None:
    """On the meta device, without a GPU: the replay returns the tuple with the integers that its backward needs."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return attend(x * 2, x * 3, x * 4).tanh()

    hidden = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    *_, tape, offloaded = recorded(block, hidden, [f"aten.{name}.default#0" for name in ATTENTION])
    [(position, tensors)] = offloaded.items()
    assert tape.decisions[position] is Decision.SWAP
    assert tensors and all(tensor.is_floating_point() for tensor in tensors)
    returned = tape.outputs[position]
    assert returned is not None and len(returned) > len(tensors)
    leaf = hidden.detach().requires_grad_()
    with Replayer(tape, offloaded) as replayer:
        output = block(leaf)
    replayer.check_complete()
    [gradient] = torch.autograd.grad(output, [leaf], torch.empty_like(output))
    assert gradient.shape == hidden.shape
    # Recomputed, it draws the same numbers: the tape holds the generator's state for its position.
    *_, again, _ = recorded(block, hidden)
    assert again.decisions[position] is Decision.EXEC
    assert position in again.random_states


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_draws_if_it_drops(dropout: float) -> None:
    hidden = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    _, given = record(lambda x: attend(x, x, x, dropout, True)[0], hidden)
    assert len(given.random_states) == (dropout > 0)
    _, default = record(lambda x: attend(x, x, x)[0], hidden)
    assert not default.random_states


def test_tapes_that_are_alike_share_their_memory(weights: list[nn.Parameter], hidden: torch.Tensor) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x @ weights[0], 0.5).tanh() @ weights[1]

    tapes = Tapes()
    states = []
    for number in range(2):
        _, tape = record(block, hidden)
        tapes.put(1, number, tape)
        states.append(tape.random_states)
    first, second = tapes.take(1, 0), tapes.take(1, 1)
    assert first.funcs is second.funcs and first.decisions is second.decisions and first.outputs is second.outputs
    # Each has drawn numbers of its own.
    assert (first.random_states, second.random_states) == tuple(states)
    [drawn], [drawn_then] = first.random_states.values(), second.random_states.values()
    assert not torch.equal(drawn, drawn_then)
    with pytest.raises(KeyError):
        tapes.take(1, 0)


def test_tapes_keep_what_is_of_one_call(hidden: torch.Tensor) -> None:
    """The integers that attention returns for its backward, and no tensor of a tape that was taken."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return _flash(x * 2, x * 3, x * 4).tanh()

    hidden = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="meta")
    tapes = Tapes()
    for number in range(2):
        *_, tape, _ = recorded(block, hidden)
        tapes.put(1, number, tape)
    wanted, first, second = tape, tapes.take(1, 0), tapes.take(1, 1)
    assert second.outputs == wanted.outputs
    [position] = [number for number, func in enumerate(tape.funcs) if "attention" in str(func)]
    ours, others = first.outputs[position], second.outputs[position]
    assert ours is not None and others is not None
    seeds = [weakref.ref(part) for part in ours if isinstance(part, torch.Tensor)]
    assert seeds and all(seed() is not other for seed in seeds for other in others)
    del first, ours
    assert not any(seed() for seed in seeds)


class InPlace(torch.autograd.Function):
    """Doubles its input in its own memory, as fused rotary kernels do, where no dispatch mode sees it."""

    @staticmethod
    def forward(_: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        memory_of(x)[:] *= 2
        return x

    @staticmethod
    def backward(_: FunctionCtx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class MarkedInPlace(InPlace):
    """The same, told to autograd."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        memory_of(x)[:] *= 2
        return x


class DetachedInPlace(InPlace):
    """The same, through an alias."""

    @staticmethod
    def forward(_: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        x.detach().numpy()[:] *= 2
        return x


class OutOfPlace(InPlace):
    """Reads its input where no dispatch mode sees it."""

    @staticmethod
    def forward(_: FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        output = torch.empty(x.shape)
        memory_of(output)[:] = 2 * memory_of(x)
        return output


class TwoOfThem(torch.autograd.Function):
    """Doubles tensors in a list, and saves one of them."""

    @staticmethod
    def forward(ctx: FunctionCtx, factor: float, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for each in (x, y):
            memory_of(each)[:] *= factor
        ctx.save_for_backward(x)
        return x, y

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return None, gradients[0] * 2 + x * 0, gradients[1] * 2


def memory_of(tensor: torch.Tensor) -> numpy.typing.NDArray[numpy.float32]:
    return numpy.ctypeslib.as_array((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))


@pytest.mark.parametrize("function", [InPlace, MarkedInPlace, DetachedInPlace, OutOfPlace, TwoOfThem])
def test_what_a_custom_function_reads_is_never_swapped(
    function: type[torch.autograd.Function], weights: list[nn.Parameter], hidden: torch.Tensor
) -> None:
    """Its kernels may write it where nothing sees it. Each operator alone is swapped, and all of them."""

    def block(x: torch.Tensor) -> torch.Tensor:
        query, key = (x @ weights[0]).clone(), torch.sin(x @ weights[1])
        if function is TwoOfThem:
            query, key = TwoOfThem.apply(2.0, query, key)
        else:
            query, key = function.apply(query), function.apply(key)
        return functional.silu(query * key) @ weights[2] + query

    plain = gradients(block, hidden, weights, None)
    _, recorder, *_ = recorded(block, hidden)
    keys = [operator.key for operator in recorder.operators]
    for swapped in [[], *([key] for key in keys), keys]:
        *_, tape, offloaded = recorded(block, hidden, swapped)
        leaf = hidden.detach().requires_grad_()
        with Replayer(tape, dict(offloaded)) as replayer:
            output = block(leaf)
        replayer.check_complete()
        torch.manual_seed(9)
        found = torch.autograd.grad(output, [leaf, *weights], torch.randn_like(output))
        assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True)), swapped


def test_watching_custom_functions_ends_with_the_recording() -> None:
    before = torch.autograd.Function.apply.__func__
    with Recorder().recording():
        assert torch.autograd.Function.apply.__func__ is not before
    assert torch.autograd.Function.apply.__func__ is before
