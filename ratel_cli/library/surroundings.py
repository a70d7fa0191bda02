"""What the caller has set for all of torch around a call of Ratel: autocast, default device and dtype, gradients off.

Ratel's own code makes tensors and computes gradients there, and a model that is opened computes in its own dtype.

Invariant: with a setting that would change results, or leave a tensor without values, there is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ratel_cli.errors import BadInput


@contextmanager
def usual_settings(asked: str) -> Iterator[None]:
    """A context in which gradients are on, also under `torch.no_grad` and `torch.inference_mode`. `asked`: what the
    caller has called. Raises BadInput."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    for is_set, setting, hint in (
        (is_cast, "torch.autocast is on", "leave it out: an open model computes in the dtype that it was opened with"),
        (device.type != "cpu", f"torch's default device is {device}", "use `with torch.device('cpu')` around the call"),
        (dtype != torch.float32, f"torch's default dtype is {dtype}", "call torch.set_default_dtype(torch.float32)"),
    ):
        if is_set:
            raise BadInput(f"{setting} around {asked}", hint)
    with torch.inference_mode(mode=False):
        yield
