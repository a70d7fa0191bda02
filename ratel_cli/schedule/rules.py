"""Update rules: what a block keeps for each parameter, and how finely it may be cut.

A rule gives the record of a block, by the dtype that the block computes in. The store takes fields as they come, and
what encodes and decodes them (`ratel_cli/model/records.py`) imports them from here. The kernels take the values of all
fields by position, in the order of the record, and repeat their names (`kernels/`, `ratel_cli/_native.pyi`);
`ratel_cli/engine/optimizer/adamw.py` chooses one by the compute dtype.

AdamW keeps master weights (P32), m and v (OS32) in fp32: 12 bytes for each parameter in bf16 and fp32, 14 in fp16. For
bf16 the master is split into its upper and lower half. The upper half is the weight that the device computes with
(P16), so no separate copy of it exists. Rounding loses one bit, which the sign of v carries (docs/store-format.md); a
rule without v needs another place for it. A frozen block keeps its compute weights alone,
or the bytes of quantised ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ratel_cli.sizes import WeightDtype
from ratel_cli.store.layout import Field, Record

HI16: Final = Field("hi16", "bfloat16")
"""The upper half of the master, rounded to nearest even."""
LO16: Final = Field("lo16", "int16")
W16: Final = Field("w16", "float16")
W32: Final = Field("w32", "float32")
"""The master."""
M32: Final = Field("m32", "float32")
V32: Final = Field("v32", "float32")


@dataclass(frozen=True, slots=True)
class Rule:
    """How the parameters of a block change in a step."""

    name: str
    records: tuple[tuple[WeightDtype, Record], ...]
    """By compute dtype: the fields of a block."""
    unit_elements: int = 1
    """Elements that belong together: two ranks must not have one part each. Nothing asks for it while there is one."""
    is_frozen: bool = False
    """True if nothing changes: such a block has no gradient, and lies in the store once for all generations."""

    def record(self, dtype: WeightDtype) -> Record:
        """The fields of a block that computes in `dtype`."""
        return dict(self.records)[dtype]


ADAMW: Final = Rule(
    "adamw",
    (
        ("bfloat16", Record((HI16, LO16, M32, V32))),
        ("float32", Record((W32, M32, V32))),
        ("float16", Record((W16, W32, M32, V32))),
    ),
)
FROZEN: Final = Rule(
    "frozen",
    (
        ("bfloat16", Record((Field("frozen", "bfloat16"),))),
        ("float32", Record((Field("frozen", "float32"),))),
        ("float16", Record((Field("frozen", "float16"),))),
        ("uint8", Record((Field("frozen", "uint8"),))),
    ),
    is_frozen=True,
)
RULES: Final = {rule.name: rule for rule in (ADAMW, FROZEN)}
