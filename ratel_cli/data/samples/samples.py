"""What becomes of a row: samples of token ids, with a label for each token that has loss.

Where answers are compared, a row becomes two samples, which belong together: of a pair the chosen answer and the
rejected one, each behind the prompt; of an answer with a verdict this answer behind its prompt, and the prompt alone.
The prompt's first label is then the verdict, 1 or 0, as a row's class is.

Invariant: a sample has as many labels as tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ratel_cli.data.files.remarks import Remark

TokenIds = npt.NDArray[np.int32]
"""Token ids or labels `[tokens]`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One training sample."""

    input_ids: TokenIds
    """Shape `[tokens]`."""
    labels: TokenIds
    """Shape `[tokens]`; not shifted, -100 where there is no loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The samples of one row."""

    samples: tuple[Sample, ...]
    """One; several if a long text was split; two if answers are compared; none if the row is longer than `sequence_len`
    and not truncated."""
    excess_tokens: int = 0
    """Tokens of the row beyond `sequence_len`, which no sample has."""
    remarks: tuple[Remark, ...] = ()
    """What of the row is left out, such as tool calls that the chat template did not write."""
    skips_header: bool = False
    """Whether the chat template has no generation prompt, so that loss begins behind the headers of turns."""
