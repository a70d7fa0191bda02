"""Whatever an earlier run may have left in model.json: an equal profile, or a ValueError, or none at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratel_cli.config.load import load_config
from ratel_cli.planning.profile.analytic import spec_from_shape
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile, RestCosts, SwapCandidate
from ratel_cli.run.files.run_directory import CachedProfile
from tests.hardware.profiles import WITHOUT_GPU
from tests.tiers import examples

QUICK = examples(200)
CANDIDATE = SwapCandidate(operator="mm", key="aten.mm#0", num_bytes=4096, flops=1 << 20, seconds=0.5)
REST = RestCosts(after="mlp.up_proj.weight", num_bytes=4500, flops=1)
LAYER = LayerProfile(
    input_bytes=64,
    saved_bytes=8192,
    forward_bytes=256,
    forward_held_bytes=300,
    backward_bytes=9000,
    making_bytes=8500,
    replay_bytes=8200,
    replay_held_bytes=8300,
    flops_forward=2,
    flops_recomputed=1,
    candidates=(CANDIDATE,),
    rests=(REST,),
)
PROFILE = ModelProfile(
    source="recorded",
    profiles=(LAYER,),
    layers=(0, 0),
    micro_batch_tokens=8,
    sequence_len=8,
    flops_head=1,
    norm_held_bytes=2,
    norm_bytes=3,
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def healthy() -> dict[str, object]:
    content: dict[str, object] = json.loads(json.dumps(PROFILE.to_json()))
    return content


@QUICK
@given(key=st.sampled_from(sorted(healthy())), value=VALUES)
def test_any_value(key: str, value: object) -> None:
    check({**healthy(), key: value})


@QUICK
@given(data=st.data(), value=VALUES)
def test_any_value_in_a_layer(data: st.DataObject, value: object) -> None:
    content = healthy()
    [layer] = content["profiles"]  # type: ignore[misc]
    row = data.draw(st.sampled_from([layer, layer["candidates"][0], layer["rests"][0]]))
    row[data.draw(st.sampled_from(sorted(row)))] = value
    check(content)


@QUICK
@given(content=VALUES)
def test_any_content(content: object) -> None:
    check(content)


def check(content: object) -> None:
    try:
        profile = ModelProfile.from_json(content)
    except ValueError as error:
        assert str(error)
    else:
        assert ModelProfile.from_json(profile.to_json()) == profile


@pytest.fixture
def kept(tmp_path: Path) -> CachedProfile:
    config = tmp_path / "run.yaml"
    config.write_text(f"model_shape: {{num_layers: 2, num_heads: 2, hidden_size: 8}}\noutput_dir: {tmp_path}/out\n")
    spec = spec_from_shape(name="m", num_layers=2, hidden_size=8, vocab_size=9)
    kept = CachedProfile(load_config(config).config, spec, WITHOUT_GPU)
    kept.path.parent.mkdir(parents=True)
    kept.path.write_text(json.dumps(kept.content(spec, PROFILE)))
    return kept


def test_what_was_kept_is_read(kept: CachedProfile) -> None:
    assert kept.read() == PROFILE


@QUICK
@given(data=st.data())
def test_any_file_is_a_profile_or_none(kept: CachedProfile, data: st.DataObject) -> None:
    content = kept.path.read_bytes()
    at = data.draw(st.integers(0, len(content)))
    piece = data.draw(st.binary(max_size=4) | st.sampled_from([b"[" * 50_000, b"1" * 5_000, b""]))
    kept.path.write_bytes(content[:at] + piece + content[at + len(piece) :])
    assert isinstance(kept.read(), ModelProfile | None)
    kept.path.write_bytes(content)
