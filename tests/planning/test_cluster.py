"""The plan of several ranks, against a cluster that is simulated event by event (simulated_cluster.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ratel_cli.hardware.shares import RankLayout, share_of
from ratel_cli.hardware.spec import HardwareProfile, Network
from ratel_cli.planning.profile.placement import Placement, Workload
from ratel_cli.planning.search.decisions import Decisions
from ratel_cli.planning.search.problem import Problem
from ratel_cli.planning.time.network import NO_TRAFFIC
from ratel_cli.planning.time.step_time import StepTime
from ratel_cli.schedule.slices import GATHERED_AHEAD
from ratel_cli.store.layout import WHOLE, RankSlice
from tests.planning.profiles import estimated
from tests.planning.shapes import gpt, machine
from tests.planning.simulated_cluster import Cluster, Gpt, step_seconds
from tests.planning.steps import network_traffic
from tests.tiers import rotating

PENDING = 2
OF_8 = Cluster(num_ranks=8, on_machine=4, flops=1.6e14, link=2.2e10, read=3e9, written=2.2e9, updated=1.5e9, network=0)
LAYOUTS = {"8 on 2": (8, 4), "16 on 2": (16, 8), "8 on 8": (8, 1)}
GPTS = {
    "13B": Gpt(num_layers=40, hidden_size=5120, vocab_size=50257, rows=1, sequence_len=1024),
    "70B": Gpt(num_layers=80, hidden_size=8192, vocab_size=50257, rows=1, sequence_len=1024),
    "6B, many words": Gpt(num_layers=32, hidden_size=4096, vocab_size=128256, rows=1, sequence_len=1024),
    "1B, many words": Gpt(num_layers=16, hidden_size=2048, vocab_size=128256, rows=1, sequence_len=1024),
}


def machine_of(cluster: Cluster) -> HardwareProfile:
    number = cluster.on_machine
    rates = machine(
        flops_per_second=cluster.flops,
        read_bytes_per_second=number * cluster.read,
        write_bytes_per_second=number * cluster.written,
        adam_parameters_per_second=cluster.updated,
        up_bytes_per_second=cluster.link,
        down_bytes_per_second=cluster.link,
    )
    return replace(rates, network=Network(bytes_per_second=cluster.network))


def predicted(cluster: Cluster, shape: Gpt, *, holds: bool) -> StepTime:
    number = cluster.on_machine
    spec = gpt(num_layers=shape.num_layers, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size)
    workload = Workload(
        micro_batch_size=shape.rows, num_micro_batches=shape.num_micro_batches, sequence_len=shape.sequence_len
    )
    problem = Problem(
        spec=spec,
        workload=workload,
        profile=estimated(spec, workload),
        hardware=share_of(
            machine_of(cluster), RankLayout(num_ranks=cluster.num_ranks, on_machine=number, on_drives=number)
        ),
        decisions=Decisions(holds_gradients=holds, num_slots=2, host_limit_bytes=1 << 60, activations="recompute"),
        process_bytes=0,
        rank_slice=RankSlice(cluster.num_ranks - 1, cluster.num_ranks),
    )
    return problem.evaluate(Placement(prefetch_blocks=GATHERED_AHEAD, pending_updates=PENDING)).time


@pytest.mark.parametrize(
    ("layout", "name", "rows", "network", "drives", "holds"),
    rotating(tuple(LAYOUTS), tuple(GPTS), (1, 16, 64), (25e9, 5e9), (1, 4), (False, True), full_pairs=True),
)
def test_a_step_takes_what_is_predicted(
    layout: str, name: str, rows: int, network: float, drives: int, holds: bool
) -> None:
    """Whatever is short: computing, drives or the network. Embedding and head are exchanged as a whole, and what does
    not overlap then is not predicted: with 39 % of the parameters there, a quarter of a step may be missing."""
    number, on_machine = LAYOUTS[layout]
    cluster = replace(
        OF_8,
        num_ranks=number,
        on_machine=on_machine,
        network=network,
        read=drives * OF_8.read,
        written=drives * OF_8.written,
    )
    shape = replace(GPTS[name], rows=rows)
    found = step_seconds(cluster, shape, holds=holds, pending=PENDING)
    tolerance = 0.25 if name == "1B, many words" else 0.1
    assert predicted(cluster, shape, holds=holds).total == pytest.approx(found, rel=tolerance)


def test_one_rank_moves_nothing() -> None:
    assert network_traffic(gpt(), WHOLE) == NO_TRAFFIC


def test_what_crosses_the_network() -> None:
    """By hand: bf16 weights twice but for the head and the last layer, which are used once more while they are there;
    fp32 gradients once; a byte for each of 1 + 3 * 6 + 2 parameters."""
    embedding, layer, head = 32768, 51200, 34816
    gathered = 2 * (2 * embedding + 2 * 2 * layer + layer + head)
    moved = network_traffic(gpt(), RankSlice(1, 2)).total
    assert moved.received_bytes == pytest.approx((gathered + 4 * (embedding + 3 * layer + head)) / 2 + 21, rel=0.05)
    assert (
        sum(network_traffic(gpt(), RankSlice(rank, 2)).total.sent_bytes for rank in range(2))
        == sum(network_traffic(gpt(), RankSlice(rank, 2)).total.received_bytes for rank in range(2))
        == gathered + 4 * (embedding + 3 * layer + head) + 2 * 21
    )
