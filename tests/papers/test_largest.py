"""The largest trainable model, tier by tier, and the written shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ratel_cli.papers.ratel import (
    MAX_LAYERS,
    PaperShape,
    TierBytes,
    deepest,
    fits,
    largest,
    need,
    paper_models,
    with_layers,
)
from ratel_cli.units import GIB
from tests.papers.paper_profiles import CONFIGS, paper_shape

MODELS = paper_models(batch_size=1)


def server(*, gpu_gib: int = 24, host_gib: int = 768, num_ssds: int = 12) -> TierBytes:
    """The paper's, with 3.84 TB a drive."""
    return TierBytes(
        gpu_bytes=gpu_gib * GIB,
        host_bytes=host_gib * GIB,
        nvme_bytes=num_ssds * 3_840_000_000_000,
    )


@pytest.mark.parametrize(("gpu_gib", "name", "next_name"), [(24, "276B", "412B"), (16, "175B", "276B")])
def test_largest_model_of_table_iv(gpu_gib: int, name: str, next_name: str) -> None:
    have = server(gpu_gib=gpu_gib)
    assert fits(MODELS[name], have)
    assert not fits(MODELS[next_name], have)
    assert need(MODELS[next_name]).gpu_bytes > have.gpu_bytes
    assert largest(MODELS, have) == name


def test_175b_with_256_gb_and_a_4080() -> None:
    assert fits(MODELS["175B"], server(gpu_gib=16, host_gib=256))


@pytest.mark.parametrize(("name", "batch_size"), [("13B", 64), ("70B", 32), ("175B", 16)])
def test_batches_of_the_evaluation_fit(name: str, batch_size: int) -> None:
    assert fits(replace(MODELS[name], batch_size=batch_size), server())


def test_the_gpu_needs_block_buffers_and_one_blocks_activations() -> None:
    needed = need(MODELS["13B"])
    assert needed.gpu_bytes == 96 * 5120**2 + 34 * 1024 * 5120
    assert needed.host_bytes == 96 * 5120**2 + 42 * 50257 * 5120
    assert needed.nvme_bytes == 14 * 13 * 10**9 + 2 * 1024 * 5120 * 40


def test_the_largest_tensor_is_a_matrix_where_the_vocabulary_is_small() -> None:
    assert need(replace(MODELS["13B"], vocab_size=100)).host_bytes == 96 * 5120**2 + 42 * 4 * 5120**2


@pytest.mark.parametrize("tier", ["gpu_bytes", "host_bytes", "nvme_bytes"])
def test_one_byte_less_of_any_tier_is_too_little(tier: str) -> None:
    shape = MODELS["30B"]
    exact = need(shape)
    assert fits(shape, exact)
    assert not fits(shape, replace(exact, **{tier: getattr(exact, tier) - 1}))


def test_nothing_fits_on_nothing() -> None:
    nothing = TierBytes(gpu_bytes=0, host_bytes=0, nvme_bytes=0)
    assert largest(MODELS, nothing) is None
    assert largest({}, server()) is None
    assert deepest(MODELS["6B"], nothing) is None


@pytest.mark.parametrize("num_ssds", [1, 2, 12])
def test_depth_is_bounded_by_nvme(num_ssds: int) -> None:
    have = server(num_ssds=num_ssds)
    found = deepest(MODELS["13B"], have)
    assert found is not None
    assert fits(found, have)
    more = need(with_layers(found, found.num_layers + 1))
    assert more.gpu_bytes <= have.gpu_bytes and more.host_bytes <= have.host_bytes
    assert more.nvme_bytes > have.nvme_bytes


def test_depth_ends_somewhere() -> None:
    found = deepest(MODELS["6B"], replace(server(), nvme_bytes=1 << 80))
    assert found is not None
    assert found.num_layers == MAX_LAYERS


@pytest.mark.parametrize("name", ["6B", "13B", "30B", "70B", "135B", "175B", "276B", "412B"])
def test_nominal_sizes_are_near_the_counted_ones(name: str) -> None:
    counted = with_layers(MODELS[name], MODELS[name].num_layers)
    assert counted.num_parameters == pytest.approx(MODELS[name].num_parameters, rel=0.09)


def test_written_shapes_are_those_of_table_iv() -> None:
    written = {
        path.stem.removeprefix("gpt-").upper(): paper_shape(path.stem, batch_size=1)
        for path in (CONFIGS / "models").glob("gpt-*.yaml")
    }
    assert written == MODELS


@pytest.mark.parametrize("path", sorted((CONFIGS / "models").glob("dit-*.yaml")), ids=lambda path: path.stem)
def test_diffusion_models_have_18_lh2_parameters(path: Path) -> None:
    shape: PaperShape = paper_shape(path.stem, batch_size=1)
    counted = 18 * shape.num_layers * shape.hidden_size**2
    assert counted == pytest.approx(shape.num_parameters, rel=0.16)


def test_hardware_files_have_the_keys_of_the_contract() -> None:
    paths = sorted((CONFIGS / "hardware").glob("*.yaml"))
    assert len(paths) == 16
    for path in paths:
        read = yaml.safe_load(path.read_text())
        prices = read.pop("prices", None)  # of the machines of Table VII
        assert prices is None or set(prices) == {"server_dollars", "gpu_dollars", "ssd_dollars"}
        assert {section: set(keys) for section, keys in read.items()} == KEYS
        assert read["nvme"]["free_bytes"] == read["nvme"]["num_devices"] * 3_840_000_000_000
        assert path.stem.endswith(f"-{read['nvme']['num_devices']}ssd")


KEYS = {
    "gpu": {"name", "memory_bytes", "flops_per_second", "memory_bytes_per_second"},
    "link": {"to_gpu_bytes_per_second", "from_gpu_bytes_per_second"},
    "nvme": {"num_devices", "read_bytes_per_second", "write_bytes_per_second", "free_bytes"},
    "host": {
        "num_cores",
        "activation_bytes",
        "memory_bytes",
        "available_bytes",
        "adam_parameters_per_second",
        "memory_bytes_per_second",
    },
}
