"""`state()` gives what torch's AdamW has after the same loop, bit for bit, one parameter at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import ratel_cli as ratel
from ratel_cli.model.files.stored_state import StoredState
from ratel_cli.sizes import CHUNK_ELEMENTS, DtypeName
from tests.engine.architectures import tiny_config
from tests.library import test_hook, test_own_loop
from tests.library.adapters import ADAPTERS, IN_PEFT
from tests.library.nets import NETS
from tests.library.test_own_loop import RATES, batches, large_loss, train
from tests.quantised import dequantised_weights
from tests.reference import Recipe, Trained
from tests.store.stores import flip_in

pytestmark = pytest.mark.usefixtures("_measured_briefly")

State = dict[str, dict[str, torch.Tensor]]
MOMENTS = ("exp_avg", "exp_avg_sq")


def all_of(state: Iterable[tuple[str, dict[str, torch.Tensor]]]) -> State:
    found = [(name, tensors) for name, tensors in state]
    assert len(dict(found)) == len(found)
    return dict(found)


def assert_same(found: State, wanted: Trained, *, trained: Iterable[str]) -> None:
    """`trained`: the names of what is."""
    trained = set(trained)
    assert found.keys() == wanted.weights.keys()
    assert trained == wanted.moments.keys()
    for name, tensors in found.items():
        assert tensors.keys() == {"weight", *(("exp_avg", "exp_avg_sq", "step") if name in trained else ())}, name
        assert all(each.dtype == torch.float32 and each.device.type == "cpu" for each in tensors.values()), name
        expected = {"weight": wanted.weights[name], **wanted.moments.get(name, {})}
        for key, each in tensors.items():
            assert each.shape == expected[key].shape, (name, key)
            assert torch.equal(each.view(torch.int32), expected[key].view(torch.int32)), (name, key)


@pytest.mark.parametrize(
    ("architecture", "dtype", "what"),
    [
        pytest.param("llama", "float32", "all weights", marks=pytest.mark.full),
        ("llama", "bfloat16", "lora"),
        ("llama_tied", "bfloat16", "all weights"),
        pytest.param("llama", "bfloat16", "all weights", marks=pytest.mark.nightly),
        pytest.param("llama_tied", "float32", "lora", marks=pytest.mark.full),
    ],
)
def test_an_open_model_has_the_state_of_adamw(tmp_path: Path, architecture: str, dtype: DtypeName, what: str) -> None:
    """Of what is trained; of the model beside an adapter it has the weights alone."""
    steps = batches(len(RATES), 1)
    base = test_own_loop.saved(tmp_path / "base", architecture)
    storage = [tmp_path / "a", tmp_path / "b"]
    with ratel.open(
        base, storage=storage, dtype=dtype, device="cpu", weight_decay=0.1, max_grad_norm=0.5, adapter=ADAPTERS[what]
    ) as model:
        train(model, steps)
        found = all_of(model.state())
        assert model._store.progress.step == len(RATES), "the last step is committed"
    lora = tuple(IN_PEFT.items()) if what == "lora" else None
    recipe = Recipe(dtype=test_own_loop.DTYPES[dtype], max_grad_norm=0.5, weight_decay=0.1, lora=lora)
    wanted = test_own_loop.wanted(architecture, steps, recipe)
    named = dict(AutoModelForCausalLM.from_config(tiny_config(architecture)).named_parameters())
    assert_same(found, wanted, trained=named if lora is None else [name for name in found if "lora_" in name])


def test_a_quantised_parameter_has_what_the_model_computes_with(tmp_path: Path, base: Path) -> None:
    with ratel.open(base, storage=[tmp_path / "a"], dtype="bfloat16", device="cpu", adapter=ADAPTERS["qlora"]) as model:
        found = all_of(model.state())
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    before = {name: each.detach().float() for name, each in plain.named_parameters()}
    for name, values in dequantised_weights(plain, before, "nf4 double", torch.bfloat16).items():
        own = name if name in found else name.replace(".weight", ".base_layer.weight")
        assert found[own].keys() == {"weight"} and torch.equal(found[own]["weight"], values), own


@pytest.mark.parametrize(("name", "dtype"), [("whisper", torch.float32), ("albert", torch.bfloat16)])
def test_a_hooked_module_has_the_state_of_adamw(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Parameters that blocks share, tied ones, and a frozen table of positions."""
    plain = test_hook.built(name, dtype)
    trained = [each for each, parameter in plain.named_parameters() if parameter.requires_grad]
    model = copy.deepcopy(plain)
    steps = test_hook.net_steps(name, 4, 1)
    recipe = Recipe(dtype=dtype, learning_rate=test_hook.LEARNING_RATE, weight_decay=0.1)
    wanted = test_hook.wanted(name, plain, steps, recipe)
    torch.manual_seed(3)
    with test_hook.hooked(name, model, tmp_path) as state:
        ratel.AdamW(model, lr=test_hook.LEARNING_RATE, weight_decay=0.1)
        test_hook.run(name, model, steps, state)
        assert_same(all_of(state.state()), wanted, trained=trained)


@pytest.mark.parametrize("dtype", test_hook.DTYPES)
def test_what_is_frozen_has_its_weight_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    """Whole blocks, parts of blocks and what is outside of them."""
    plain = test_hook.built("llama", dtype)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(not ("layers.1" in name or "mlp" in name or "embed" in name))
    model = copy.deepcopy(plain)
    trained = [each for each, parameter in plain.named_parameters() if parameter.requires_grad]
    steps = test_hook.net_steps("llama", 3, 1)
    recipe = Recipe(dtype=dtype, learning_rate=test_hook.LEARNING_RATE, weight_decay=0.0)
    wanted = test_hook.wanted("llama", plain, steps, recipe)
    with test_hook.hooked("llama", model, tmp_path) as state:
        ratel.AdamW(model, lr=test_hook.LEARNING_RATE, weight_decay=0.0)
        test_hook.run("llama", model, steps, state)
        found = all_of(state.state())
        test_hook.assert_same(test_hook.saved(state, tmp_path), plain)
    assert 0 < len(trained) < len(found)
    assert_same(found, wanted, trained=trained)


def test_halfway_between_two_values_of_bf16_moments_are_those_of_adamw(base: Path, tmp_path: Path) -> None:
    """Of such a master weight, rounding loses a bit that the second moment carries."""
    weights = load_file(base / "model.safetensors")
    for each in weights.values():
        each.view(torch.int32).bitwise_and_(~0xFFFF).bitwise_or_(0x8000)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    with ratel.open(base, storage=[tmp_path / "state"], dtype="bfloat16", device="cpu") as model:
        found = all_of(model.state())
    assert found.keys() == weights.keys()
    for name, tensors in found.items():
        assert torch.equal(tensors["weight"], weights[name]), name
        assert not any(tensors[key].view(torch.int32).any() for key in (*MOMENTS, "step")), name


def test_in_fp16_skipped_steps_are_no_updates(base: Path, tmp_path: Path) -> None:
    """The master weights are those of fp32, not those that the model computes with."""
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float16", device="cpu") as model:
        for step in batches(20, 1):
            model.forward_backward(step, loss=large_loss)
            model.step(learning_rate=1e-3)
        found = all_of(model.state())
        num_updates = model._store.progress.updates
    assert 0 < num_updates < 20
    assert {float(tensors["step"]) for tensors in found.values()} == {num_updates}
    assert all(not torch.equal(each["weight"], each["weight"].half().float()) for each in found.values())


def test_the_defaults_of_torch_change_nothing(base: Path, tmp_path: Path) -> None:
    with ratel.open(base, storage=[tmp_path / "state"], dtype="bfloat16", device="cpu") as model:
        wanted = all_of(model.state())
        torch.set_default_dtype(torch.float64)
        try:
            found = all_of(model.state())
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[name][key], each) for name in wanted for key, each in wanted[name].items())
    assert {each.dtype for tensors in found.values() for each in tensors.values()} == {torch.float32}


@pytest.mark.parametrize("dtype", test_hook.DTYPES)
def test_a_parameter_of_several_groups(tmp_path: Path, dtype: torch.dtype) -> None:
    """That begin and end where no chunk of the store does."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 1000), nn.Linear(1000, 600)).to(dtype)
    wanted = {name: each.detach().float().clone() for name, each in net.named_parameters()}
    with ratel.hook(net, storage=[tmp_path / "state"], blocks=["0", "1", "2"]) as state:
        stored = StoredState(state.spec, state._store.current(), state._context.pool, group_elements=CHUNK_ELEMENTS)
        for name in stored.names:
            assert torch.equal(stored.whole(name)["weight"], wanted.pop(name)), name
    assert not wanted


def test_memory_is_that_of_a_parameter_while_it_is_read(base: Path, tmp_path: Path) -> None:
    """Nothing of the limit is taken between two parameters, so that an iterator that waits takes none from a step."""
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        pool = model._context.pool
        before = pool.leased_bytes
        for _ in model.state():
            assert pool.leased_bytes == before


def test_a_step_in_between_ends_the_reading(base: Path, tmp_path: Path) -> None:
    [first], [second] = batches(2, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        model.forward_backward(first)
        model.step(learning_rate=RATES[0])
        wanted = all_of(model.state())
        half = model.state()
        found = dict([next(half)])
        model.forward_backward(second)
        found |= [next(half)]
        assert all(torch.equal(each, wanted[name][key]) for name in found for key, each in found[name].items())
        model.step(learning_rate=RATES[1])
        with pytest.raises(ratel.RatelError, match=r"before state\(\) was read to its end: it is of step 1"):
            next(half)
        assert len(all_of(model.state())) == len(wanted)


def test_a_step_of_a_hooked_module_ends_the_reading(tmp_path: Path) -> None:
    """It ends in backward."""
    model = test_hook.built("llama")
    with test_hook.hooked("llama", model, tmp_path) as state:
        half = state.state()
        next(half)
        ratel.AdamW(model, lr=1e-3)
        next(half)
        [[batch]] = test_hook.net_steps("llama", 1, 1)
        loss = NETS["llama"].loss(model, batch)
        next(half)
        loss.backward()
        with pytest.raises(ratel.RatelError, match="a step was taken before"):
            next(half)


def test_it_is_asked_for_between_steps_of_what_is_open(base: Path, tmp_path: Path) -> None:
    [[batch]] = batches(1, 1)
    with ratel.open(base, storage=[tmp_path / "state"], dtype="float32", device="cpu") as model:
        half = model.state()
        model.forward_backward(batch)
        with pytest.raises(ratel.RatelError, match="state was called between forward_backward and step"):
            model.state()
    with pytest.raises(ratel.RatelError, match="the model is closed"):
        model.state()
    with pytest.raises(ratel.RatelError, match="the model is closed"):
        next(half)
    with test_hook.hooked("llama", test_hook.built("llama"), tmp_path / "hooked") as state:
        half = state.state()
    for asked in (state.state, lambda: next(half)):
        with pytest.raises(ratel.RatelError, match="the hooked module is closed"):
            asked()


def test_damage_is_found_where_it_is_read(tmp_path: Path) -> None:
    """In a moment, which no export reads."""
    model = test_hook.built("llama")
    [[batch]] = test_hook.net_steps("llama", 1, 1)
    with test_hook.hooked("llama", model, tmp_path) as state:
        ratel.AdamW(model, lr=1e-3)
        NETS["llama"].loss(model, batch).backward()
        wanted = all_of(state.state())
        flip_in(tmp_path / "state", wanted["lm_head.weight"]["exp_avg"].numpy().tobytes()[:64])
        state.save(tmp_path / "out")
        with pytest.raises(ratel.RatelError, match="are not what step 1 wrote") as raised:
            all_of(state.state())
        assert raised.type.__name__ == "IntegrityFailure"
