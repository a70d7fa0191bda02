"""FLOPs against the papers' closed form, and the serial sum against its parts."""

from __future__ import annotations

import pytest

from ratel_cli.model.spec import ModelSpec, lay_out_block
from ratel_cli.planning.capacity import Workload
from ratel_cli.planning.costs import forward_flops, layer_flops, serial_step
from ratel_cli.planning.traffic import Traffic, step_traffic
from tests.planning.shapes import BFLOAT16, WORKLOAD, gpt, machine


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("num_layers", "h", "vocab_size", "b", "n", "s"),
    [(1, 64, 512, 1, 1, 1), (3, 96, 333, 2, 5, 77), (40, 5120, 50257, 8, 4, 1024)],
)
def test_forward_of_a_gpt(num_layers: int, h: int, vocab_size: int, b: int, n: int, s: int, tied: bool) -> None:
    """papers.md section 2: L (24 b s h^2 + 4 b s^2 h) + 2 b s h V, b being all sequences of the step."""
    spec = gpt(num_layers=num_layers, hidden_size=h, vocab_size=vocab_size, tied=tied)
    workload = Workload(micro_batch_size=b, num_micro_batches=n, sequence_len=s)
    sequences = b * n
    layers = num_layers * (24 * sequences * s * h**2 + 4 * sequences * s**2 * h)
    assert layer_flops(spec, workload) == layers
    assert forward_flops(spec, workload) == layers + 2 * sequences * s * h * vocab_size


def test_the_papers_13b_at_batch_32() -> None:
    """papers.md section 3: exact."""
    spec = gpt(num_layers=40, hidden_size=5120, vocab_size=50257)
    workload = Workload(micro_batch_size=32, num_micro_batches=1, sequence_len=1024)
    assert forward_flops(spec, workload) == 868_984_962_416_640


def test_stacks_of_matrices_count_whole() -> None:
    stack = lay_out_block(index=1, kind="layer", name="layer", parameters=[("experts", (4, 8, 16), True)])
    plain = gpt(num_layers=1)
    spec = ModelSpec(
        name="moe",
        architecture="MoE",
        blocks=(plain.blocks[0], stack, plain.blocks[2]),
        tied=False,
        hidden_size=16,
        vocab_size=512,
    )
    workload = Workload(micro_batch_size=1, num_micro_batches=1, sequence_len=10)
    assert layer_flops(spec, workload) == 10 * (2 * 4 * 8 * 16 + 4 * 10 * 16)


def test_a_step_is_the_sum_of_its_parts() -> None:
    spec = gpt()
    traffic = step_traffic(spec, BFLOAT16, holds_gradients=False)
    time = serial_step(spec, WORKLOAD, traffic, machine())
    layers, whole = layer_flops(spec, WORKLOAD), forward_flops(spec, WORKLOAD)
    # The head is not computed again: its forward and backward are one.
    assert time.forward.compute + time.backward.compute == pytest.approx((3 * whole + layers) / 1e12, rel=1e-12)
    assert time.forward.nvme_read + time.backward.nvme_read == pytest.approx(traffic.read_bytes / 2e9, rel=1e-12)
    assert time.backward.nvme_write == traffic.written_bytes / 1e9
    assert time.backward.optimizer == spec.num_parameters / 1e9
    assert (time.forward.nvme_write, time.forward.optimizer) == (0, 0)
    assert time.total == time.forward.total + time.backward.total


@pytest.mark.parametrize(
    ("slow", "bottleneck"),
    [
        ({"flops_per_second": 1e3}, "compute"),
        ({"read_bytes_per_second": 1e3}, "nvme read"),
        ({"write_bytes_per_second": 1e3}, "nvme write"),
        ({"adam_parameters_per_second": 1e3}, "optimizer"),
    ],
)
def test_each_resource_can_be_the_bottleneck(slow: dict[str, float], bottleneck: str) -> None:
    spec = gpt()
    hardware = machine(
        flops_per_second=slow.get("flops_per_second", 1e12),
        read_bytes_per_second=slow.get("read_bytes_per_second", 1e12),
        write_bytes_per_second=slow.get("write_bytes_per_second", 1e12),
        adam_parameters_per_second=slow.get("adam_parameters_per_second", 1e12),
    )
    traffic = step_traffic(spec, BFLOAT16, holds_gradients=False)
    assert serial_step(spec, WORKLOAD, traffic, hardware).bottleneck == bottleneck


def test_rates_twice_as_high_halve_the_time() -> None:
    spec, traffic = gpt(), Traffic(forward_read_bytes=10**6, backward_read_bytes=10**7, written_bytes=10**7)
    once = serial_step(spec, WORKLOAD, traffic, machine())
    twice = serial_step(
        spec,
        WORKLOAD,
        traffic,
        machine(
            flops_per_second=2e12,
            read_bytes_per_second=4e9,
            write_bytes_per_second=2e9,
            adam_parameters_per_second=2e9,
        ),
    )
    assert once.total == pytest.approx(2 * twice.total, rel=1e-12)
