"""Numbers that a dtype cannot hold: float16 ends at 65504, and what is larger becomes infinite without an error.

Invariant: where weights are rounded to float16, or computed from codes, a number that is not finite then is refused,
with the name of its tensor.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from ratel_cli.errors import BadInput, excerpt

OTHER_DTYPE: Final = "set dtype: bfloat16, which has the range of float32"


def rounded(name: str, values: torch.Tensor, dtype: torch.dtype, *, hint: str = OTHER_DTYPE) -> torch.Tensor:
    """Values of a tensor in `dtype`. Raises BadInput, which names the tensor, if one of them is not finite."""
    found = values.to(dtype)
    is_finite = found.isfinite()
    if not is_finite.all():
        worst, kind = values[~is_finite][0].item(), str(dtype).removeprefix("torch.")
        most = " (65504 at most)" if dtype == torch.float16 else ""
        why = f", which is beyond the range of {kind}{most}" if not math.isnan(worst) else ""
        raise BadInput(f"tensor {excerpt(name)} has the value {worst:g}{why}", hint if why else None)
    return found
