"""What `ratel plan --direct` is made from: groups of parameters, the GPU's weights, and what is compared."""

from __future__ import annotations

from collections import Counter

import pytest

from ratel_cli.model.values.spec import LayerTraits
from ratel_cli.papers.memferry_costs import WeightUse, weight_uses
from ratel_cli.papers.memferry_forecast import RESERVE_FACTORS, DirectForecast, direct_forecast
from ratel_cli.planning.profile.analytic import analytic_profile, spec_from_shape
from ratel_cli.planning.profile.placement import Workload
from tests.hardware.profiles import WITH_GPU, WITHOUT_GPU

LAYERS = 4
SPEC = spec_from_shape(name="gpt", num_layers=LAYERS, hidden_size=768, vocab_size=50257)
TRAITS = LayerTraits(num_heads=12, head_dim=64)


def forecast(tokens: int, *, is_paper: bool) -> DirectForecast:
    step = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=tokens)
    found = direct_forecast(SPEC, analytic_profile(SPEC, step, traits=TRAITS), step, WITH_GPU, is_paper=is_paper)
    assert found is not None
    return found


@pytest.mark.parametrize("is_paper", [True, False])
@pytest.mark.parametrize("tokens", [64, 2048])
def test_groups_are_all_parameters(tokens: int, is_paper: bool) -> None:
    found = forecast(tokens, is_paper=is_paper)
    assert [(group.layer.name, group.count) for group in found.groups] == [
        ("embedding.weight", 1),
        ("norm1.weight", LAYERS),
        ("qkv.weight", LAYERS),
        ("projection.weight", LAYERS),
        ("norm2.weight", LAYERS),
        ("fc1.weight", LAYERS),
        ("fc2.weight", LAYERS),
        ("norm.weight", 1),
        ("embedding.weight (head)", 1),
    ]
    assert found.uploaded_bytes == sum(group.count * group.weight_bytes for group in found.groups)
    modes = sum((Counter(dict(group.modes)) for group in found.groups), Counter())
    assert modes == Counter(found.plan.modes)
    assert found.kept_bytes <= found.uploaded_bytes


def test_where_reading_in_place_gains() -> None:
    """By MemFerry's equations, in a small model with few tokens, that is in an embedding; where the link is shared, and
    with many tokens, nowhere."""
    small = forecast(64, is_paper=True)
    assert small.plan.gain > 0.1 and small.plan.time.total <= small.printed.total
    assert small.groups[0].modes == {"DHA": 1}
    assert small.kept_bytes < small.uploaded_bytes
    for found in (forecast(64, is_paper=False), forecast(32768, is_paper=False)):
        assert found.plan.gain == 0.0
        assert found.kept_bytes == found.uploaded_bytes
        assert all(group.modes == {"GFGB": group.count} for group in found.groups)


def test_a_larger_reserve_factor_adds_no_time() -> None:
    found = forecast(64, is_paper=True).gradients
    assert tuple(each.reserve_factor for each in found) == RESERVE_FACTORS
    added = [each.added_seconds for each in found]
    assert added == sorted(added, reverse=True)
    assert added[0] > 0 and added[-1] == pytest.approx(0.0)
    total = sum(use.gradient.num_bytes for use in uses_of(64))
    assert all(each.kept_bytes <= each.reserve_factor * total for each in found)


def uses_of(tokens: int) -> tuple[WeightUse, ...]:
    step = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=tokens)
    return weight_uses(SPEC, analytic_profile(SPEC, step, traits=TRAITS), step, WITH_GPU, is_paper=True)


def test_a_cpu_has_nothing_to_read_in_place() -> None:
    step = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=64)
    profile = analytic_profile(SPEC, step, traits=TRAITS)
    assert direct_forecast(SPEC, profile, step, WITHOUT_GPU, is_paper=False) is None
