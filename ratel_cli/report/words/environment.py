"""The rows of `ratel env`. Invariant: nothing heavy is imported."""

from __future__ import annotations

from ratel_cli.hardware.environment import Environment, StorageFacts
from ratel_cli.units import counted, format_bytes


def environment_rows(found: Environment) -> list[tuple[str, str]]:
    """Rows of a name and a fact."""
    build = {"torch": f" ({found.torch_build})" if found.torch_build else ""}
    sets = ", ".join(found.instruction_sets) or "no instruction sets known"
    memory = f"{format_bytes(found.memory_bytes)}, {format_bytes(found.available_bytes)} of it available"
    if found.group_limit_bytes is not None:
        memory += f", {format_bytes(found.group_limit_bytes)} by the limit of the control group"
    gpus = [(name, found.gpus.count(name)) for name in dict.fromkeys(found.gpus)]
    return [
        *((name, version + build.get(name, "")) for name, version in found.packages.items()),
        ("python", found.python),
        ("system", f"{found.system}, kernel {found.kernel}, {found.libc or 'unknown libc'}"),
        ("CPU", f"{found.processor}, {counted(found.num_cores, 'core')}: {sets}; kernels use {found.kernels_use}"),
        ("memory", memory),
        ("GPU", ", ".join(f"{count} x {name}" for name, count in gpus) or "none visible"),
        *([("driver", found.gpu_driver)] if found.gpu_driver else []),
        *((f"storage {number}", _storage(each)) for number, each in enumerate(found.storage, start=1)),
    ]


def _storage(facts: StorageFacts) -> str:
    drives = " + ".join(facts.drives)
    words = [f"{facts.file_system} on {drives}" if drives else facts.file_system]
    words += ["rotating"] if facts.rotates else []
    words += ["read-only"] if facts.is_read_only else []
    return ", ".join([*words, f"{format_bytes(facts.free_bytes)} free"])
