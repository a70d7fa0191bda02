"""What `ratel doctor` finds about NUMA nodes: whether processor, GPU and drives are on the same one.

On a machine with two sockets, memory is that of the socket on which it was touched first. What lies on the other one
than the GPU or the drive crosses the link between the sockets, and may come at half the rate.

Invariant: a check depends only on its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ratel_cli.hardware.checkup import Diagnosis
from ratel_cli.hardware.system_files import SystemFiles

_NODES: Final = "sys/devices/system/node"


def check_numa(files: SystemFiles, gpus: Sequence[str], drives: Sequence[str]) -> Iterator[Diagnosis]:
    """For each GPU: where it is, the drives are, and this process may run. Nothing where there is one node.

    `gpus`: addresses on the PCI bus, such as `0000:01:00.0`. `drives`: names of drives, such as `nvme0n1`.
    """
    cores = _cores_by_node(files)
    if len(cores) < 2:
        return
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", files.text("proc/self/status") or "", flags=re.MULTILINE)
    mine = set().union(*cores.values()) if allowed is None else _numbers(allowed[1])
    for gpu in gpus:
        node = _node_of(files, files.real(f"sys/bus/pci/devices/{gpu.lower()}"))
        if node in cores:
            yield _diagnosis(gpu, node, is_bound=mine <= cores[node], drives=_nodes_of_drives(files, drives))


def _diagnosis(gpu: str, node: int, *, is_bound: bool, drives: dict[str, int]) -> Diagnosis:
    what, far = f"NUMA {gpu.lower()}", {name: other for name, other in drives.items() if other != node}
    if is_bound and not far:
        return Diagnosis(what=what, verdict="ok", reason=f"GPU, processor and drives on node {node}")
    facts, remedies = [f"the GPU is on node {node}"], []
    if not is_bound:
        facts.append("a run may take processors and memory of other nodes")
        remedies.append(f"start it with numactl --cpunodebind={node} --preferred={node}")
    if far:
        facts.append("drives on others: " + ", ".join(f"{name} on node {other}" for name, other in far.items()))
        remedies.append(f"set storage.paths to drives of node {node}")
    return Diagnosis(what=what, verdict="slow", reason=", ".join(facts), remedy="; ".join(remedies))


def _cores_by_node(files: SystemFiles) -> dict[int, set[int]]:
    """The nodes that have processors."""
    nodes = (int(name[4:]) for name in files.names(_NODES) if re.fullmatch(r"node\d+", name))
    cores = {node: _numbers(files.text(f"{_NODES}/node{node}/cpulist") or "") for node in nodes}
    return {node: numbers for node, numbers in cores.items() if numbers}


def _nodes_of_drives(files: SystemFiles, drives: Sequence[str]) -> dict[str, int]:
    nodes = {name: _node_of(files, files.real(f"sys/class/block/{name}")) for name in drives}
    return {name: node for name, node in nodes.items() if node is not None}


def _node_of(files: SystemFiles, device: Path | None) -> int | None:
    """The node of a device, or of what it is plugged into; None if the kernel names none (it says -1 then)."""
    for place in () if device is None else (device, *device.parents):
        node = files.number(place / "numa_node")
        if node is not None:
            return node if node >= 0 else None
    return None


def _numbers(ranges: str) -> set[int]:
    """The numbers in text such as `0-3,8`."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", ranges):
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
