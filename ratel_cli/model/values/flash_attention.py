"""The packages of flash attention: what they are called, and from which version on their backward is deterministic.

torch's switch for deterministic operators does not reach these packages. transformers passes them `deterministic` where
their functions take it, and takes its value from the environment (hardware/gpu.py sets it). Taking it is not enough:

* flash-attn has a deterministic backward since 2.4.1, where the argument appeared.
* flash-attn-3 ignored the argument from January to September 2025. All builds of that time call themselves 3.0.0 with a
  suffix of a pre-release, and so do later ones that honour it; 3.0.0 itself does.

Invariant: a package passes only if its version is known to compute what the argument says.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Final

from packaging.version import InvalidVersion, Version

from ratel_cli.errors import BadInput

_ARGUMENT: Final = "deterministic"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPackage:
    """A package of attention kernels."""

    name: str
    """On PyPI."""
    module: str
    deterministic_since: str
    """The first version whose backward is deterministic if it is asked for."""


KERNEL_PACKAGES: Final = {
    "flash_attention_2": KernelPackage(name="flash-attn", module="flash_attn", deterministic_since="2.4.1"),
    "flash_attention_3": KernelPackage(name="flash-attn-3", module="flash_attn_interface", deterministic_since="3.0.0"),
}
"""By attention implementation, for those that are a package of their own."""


def require_deterministic(attention: str) -> None:
    """Raise BadInput if this attention implementation cannot give the same bits every time."""
    package = KERNEL_PACKAGES.get(attention)
    if package is None:
        return
    failure = _failure(package)
    if failure is not None:
        raise BadInput(
            f"deterministic: true, but {attention} may give other bits each time: {failure}",
            f"set attn_implementation: sdpa, install {package.name} {package.deterministic_since} or newer, or set "
            "deterministic: false; two runs may then differ in their last bits",
        )


def _failure(package: KernelPackage) -> str | None:
    """Why the installed package cannot be deterministic; None if it can."""
    try:
        version = metadata.version(package.name)
        is_new_enough = Version(version) >= Version(package.deterministic_since)
    except (metadata.PackageNotFoundError, InvalidVersion):
        return f"which {package.name} is installed is not known"
    if not is_new_enough:
        return f"{package.name} {version} has no deterministic backward that can be relied on"
    # The function that transformers asks, too, before it passes the argument to any of them.
    function = import_module(package.module).flash_attn_varlen_func
    if _ARGUMENT not in inspect.signature(function).parameters:
        return f"this build of {package.name} {version} does not take `{_ARGUMENT}`"
    return None
