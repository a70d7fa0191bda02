"""What goes from use to use besides hidden states: an input for every layer, keys and values that layers share, what a
layer returns for the next one. Training equals plain PyTorch, and gradients are added in its order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ratel_cli.engine.replay.repeating import Unrepeated
from ratel_cli.model.values.carried import Argument, Carried, Embedded, LayerCall, LayerOutput
from ratel_cli.sizes import DtypeName
from tests.engine.exactness import PLACEMENTS, assert_same_training, check_training, reference
from tests.engine.machine import initial_weights, machine, packs, random_steps
from tests.engine.mixed import CARRYING, SHARING, mixed_config, mixed_recipe
from tests.tiers import rotating, thinned


@pytest.mark.parametrize(
    ("family", "dtype", "max_grad_norm"),
    thinned(rotating(CARRYING, ["bfloat16", "float32"], [None, 0.5], every=4), every=2),
)
def test_equals_plain_pytorch(tmp_path: Path, family: str, dtype: DtypeName, max_grad_norm: float | None) -> None:
    recipe = mixed_recipe(family, dtype, max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, mixed_config(family), recipe, num_steps=3, num_micro_batches=3)


@pytest.mark.parametrize(
    ("placement", "family", "max_grad_norm"),
    rotating(list(PLACEMENTS), CARRYING, [None, 0.5], every=24),
)
def test_wherever_bytes_rest(tmp_path: Path, placement: str, family: str, max_grad_norm: float | None) -> None:
    recipe = mixed_recipe(family, "bfloat16", max_grad_norm=max_grad_norm)
    check_training(machine, tmp_path, mixed_config(family), recipe, **PLACEMENTS[placement])


@pytest.mark.parametrize("family", ["gemma4_text", SHARING, pytest.param("zaya", marks=pytest.mark.full)])
def test_evaluation_is_the_plain_loss(tmp_path: Path, family: str) -> None:
    config, recipe = mixed_config(family), mixed_recipe(family, "float32", max_grad_norm=None)
    steps = random_steps(1, 3, packed=packs(config))
    with machine(tmp_path, config, recipe, weights=initial_weights(config)) as ratel:
        total = ratel.engine.evaluate(steps[0]).loss
        assert_same_training(ratel.train(steps, recipe), ratel.weights(), reference(config, steps, recipe))
    assert total / sum(batch.num_targets for batch in steps[0]) == reference(config, steps, recipe).losses[0]


def test_a_layer_that_fails_leaves_nothing() -> None:
    """It may be run again: a unit that does not repeat its template is."""
    shared: dict[object, Argument] = {"old": torch.ones(1)}
    call = LayerCall(arguments=(shared,), keywords={})
    carried = Carried(Embedded(hidden=torch.zeros(1), calls=(call,), extras=((),)))

    def fails(call: LayerCall) -> LayerOutput:
        shared.update(old=torch.zeros(1), new=torch.ones(2))
        raise Unrepeated

    before = dict(shared)
    with pytest.raises(Unrepeated):
        carried.forward(0, fails, has_backward=True)
    assert shared == before
    carried.forward(0, lambda call: (torch.zeros(1), None), has_backward=True)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(3, 2),
        torch.ones(2, 3).t(),
        torch.ones(2, 2, dtype=torch.half),
        torch.ones(2, 2).requires_grad_(),
        None,
    ],
    ids=["shape", "strides", "dtype", "gradient", "none"],
)
def test_arguments_that_may_decide_on_operators_differ(other: torch.Tensor | None) -> None:
    def signature(mask: torch.Tensor | None, number: int = 1) -> object:
        call = LayerCall(arguments=(mask, number), keywords={"shared": {"a": (mask,)}})
        return Carried(Embedded(hidden=torch.zeros(1), calls=(call,), extras=((),))).signature(0)

    mask = torch.ones(2, 2)
    assert signature(mask) == signature(torch.zeros(2, 2)) != signature(other)
    assert signature(mask) != signature(mask, 2)


NUM_LAYERS, WIDTH = 5, 64


class Program:
    """Layers that read at random, and several times, what was computed before them, what layers below have left in a
    mapping under a few keys, and what the one below has returned."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(WIDTH, generator=self.generator).bfloat16().requires_grad_()
        self.reads = [[choose.choice(("bias", "a", "b", "below")) for _ in range(4)] for _ in range(NUM_LAYERS)]
        self.leaves = [choose.choice(("a", "b", None)) for _ in range(NUM_LAYERS)]
        self.extras = tuple((torch.zeros((), dtype=torch.long),) for _ in range(NUM_LAYERS))

    def embed(self) -> Embedded:
        hidden = self.weight * 1.5
        bias, shared = torch.sin(self.weight * hidden), dict[object, Argument]()
        calls = [
            LayerCall(arguments=(bias, below), keywords={"shared": shared}) for (below,) in ((None,), *self.extras[:-1])
        ]
        return Embedded(hidden=hidden, calls=tuple(calls), extras=self.extras)

    def layer(self, index: int, hidden: torch.Tensor, call: LayerCall) -> LayerOutput:
        bias, below = call.arguments
        shared = call.keywords["shared"]
        assert isinstance(shared, dict)
        for name in self.reads[index]:
            found = {"bias": bias, "below": below}.get(name, shared.get(name))
            if isinstance(found, tuple):
                found = found[0] * found[1]
            if found is not None:
                assert isinstance(found, torch.Tensor)
                hidden = torch.tanh(hidden + hidden * found * 0.7) + found * 0.3
        left = self.leaves[index]
        if left is not None:
            shared[left] = (torch.cos(hidden), hidden * 0.5)
        return hidden, (torch.sin(hidden * 1.1),)


@pytest.mark.parametrize("seed", range(40))
def test_gradients_are_those_of_one_graph(seed: int) -> None:
    """In bf16, where another order of additions gives other bits."""
    program = Program(seed)
    gradient = torch.randn(WIDTH, generator=program.generator).bfloat16()
    embedded = program.embed()
    hidden, below = embedded.hidden, None
    for index, call in enumerate(embedded.calls):
        whole = LayerCall(arguments=(call.arguments[0], below), keywords=call.keywords)
        hidden, (below,) = program.layer(index, hidden, whole)
    (wanted,) = torch.autograd.grad(hidden, program.weight, gradient)

    embedded = program.embed()
    carried, hidden_states = Carried(embedded), [embedded.hidden.detach()]
    for index in range(NUM_LAYERS):
        leaf = hidden_states[-1].requires_grad_()
        output = carried.forward(
            index, lambda call, index=index, leaf=leaf: program.layer(index, leaf, call), has_backward=True
        )
        hidden_states.append(output.detach())
    assert torch.equal(hidden_states.pop(), hidden)
    for index in reversed(range(NUM_LAYERS)):
        leaf = hidden_states.pop().requires_grad_()
        output, roots = carried.replay(index, lambda call, index=index, leaf=leaf: program.layer(index, leaf, call))
        torch.autograd.backward([output, *roots.tensors], [gradient, *roots.gradients], inputs=[leaf, *roots.inputs])
        assert leaf.grad is not None
        gradient = leaf.grad
    embedded = program.embed()
    roots = carried.root_embedding(embedded)
    (found,) = torch.autograd.grad((embedded.hidden, *roots.tensors), program.weight, (gradient, *roots.gradients))
    assert torch.equal(found, wanted)
    assert carried.from_layers == []
