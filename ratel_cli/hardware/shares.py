"""What one rank has of a machine on which several ranks train one model. Pure.

Drives, main memory, cores and the network are shared equally. Each rank has a GPU of its own; the link is shared by
those below one root complex. What ranks of one machine send each other goes through its main memory.

Invariant: the shares of all ranks of a machine are no more than the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ratel_cli.hardware.spec import HardwareProfile, Host, Link, Network, Nvme

_COPIES = 4
"""Bytes of main memory that move for each byte between two ranks of a machine: it is copied out and in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """How many ranks train, and where."""

    num_ranks: int = 1
    on_machine: int = 1
    """Ranks on this rank's machine, itself included."""
    on_drives: int = 1
    """Ranks that share this rank's drives, itself included."""


ONE_RANK = RankLayout()


def share_of(machine: HardwareProfile, layout: RankLayout, *, network: Network | None = None) -> HardwareProfile:
    """One rank's share. `network`: measured between it and all others; None: it follows from that of the machine."""
    if layout.num_ranks == 1:
        return machine
    return replace(
        machine,
        link=machine.link and _link(machine.link, min(layout.on_machine, machine.link.num_sharing)),
        nvme=_nvme(machine.nvme, layout.on_drives),
        host=_host(machine.host, layout.on_machine),
        network=network or _network(machine, layout),
    )


def _link(link: Link, number: int) -> Link:
    return replace(
        link,
        to_gpu_bytes_per_second=link.to_gpu_bytes_per_second / number,
        from_gpu_bytes_per_second=link.from_gpu_bytes_per_second / number,
        both_bytes_per_second=link.both_bytes_per_second / number,
    )


def _nvme(nvme: Nvme, number: int) -> Nvme:
    endurance = nvme.endurance_tb_written
    return replace(
        nvme,
        read_bytes_per_second=nvme.read_bytes_per_second / number,
        write_bytes_per_second=nvme.write_bytes_per_second / number,
        mixed_bytes_per_second=nvme.mixed_bytes_per_second / number,
        free_bytes=nvme.free_bytes // number,
        endurance_tb_written=None if endurance is None else endurance / number,
    )


def _host(host: Host, number: int) -> Host:
    rate = host.memory_bytes_per_second
    return replace(
        host,
        memory_bytes=host.memory_bytes // number,
        available_bytes=host.available_bytes // number,
        memory_bytes_per_second=None if rate is None else rate / number,
        num_cores=max(1, host.num_cores // number),
    )


def _network(machine: HardwareProfile, layout: RankLayout) -> Network | None:
    """The rate at which a rank sends to all others, as much to each, while all ranks do.

    Those of other machines get it over the network of this one, those of this machine through its main memory, at once.
    """
    here, everywhere = layout.on_machine, layout.num_ranks
    seconds_per_byte = [0.0]  # of what the rank sends in all
    if everywhere > here and machine.network is not None:
        seconds_per_byte.append(here * (everywhere - here) / (everywhere - 1) / machine.network.bytes_per_second)
    if here > 1 and machine.host.memory_bytes_per_second is not None:
        local_share = here * (here - 1) / (everywhere - 1)
        seconds_per_byte.append(_COPIES * local_share / machine.host.memory_bytes_per_second)
    slowest = max(seconds_per_byte)
    return Network(bytes_per_second=1 / slowest) if slowest else None
