"""All that training has of the parameters of one generation, decoded from the store's records, one parameter at a time.

Memory is a group of elements while a parameter is read, and what is handed over. Invariant: the values are those that
the reference of the parameter's rule would have after the same steps, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from ratel_cli.io.buffers import BufferPool
from ratel_cli.model.files.quantised import dequantised
from ratel_cli.model.files.quantised_model import QuantisedWeight
from ratel_cli.model.files.stored_weights import groups_of
from ratel_cli.model.values.records import RecordBuffers, decode_state, state_fields_for, state_keys
from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.schedule.rules import W32
from ratel_cli.store.joined import Readable

_GROUP_ELEMENTS: Final = 1 << 20
"""Elements that are read at once: 4 MiB of each fp32 field, what the queues move in one request."""


class StoredState:
    """Reads the training state of the parameters of one generation."""

    def __init__(
        self,
        spec: ModelSpec,
        generation: Readable,
        pool: BufferPool,
        *,
        group_elements: int = _GROUP_ELEMENTS,
        quantised: Mapping[str, QuantisedWeight] = MappingProxyType({}),
    ) -> None:
        """Memory comes from `pool` while a parameter is read. `quantised`: how parameters are quantised, by name."""
        self._generation, self._pool, self._quantised = generation, pool, quantised
        self._group_elements = max(1, min(group_elements, max(spec.block_elements)))
        self._placed = {each.name: (block, each) for block in spec.blocks for each in block.parameters}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters, in the order of the store. A tied one has one name."""
        return tuple(self._placed)

    def whole(self, name: str) -> dict[str, torch.Tensor]:
        """What training has of a parameter, each in fp32, in the parameter's shape and in memory of its own: `weight`,
        the master, and of a quantised one what the model computes with; and if it is trained, the moments of its rule,
        `exp_avg` and `exp_avg_sq` of AdamW, and `step`, a scalar: the number of updates.

        Raises IntegrityFailure if a record is damaged, DoesNotFit if the pool has no memory for a group.
        """
        block, parameter = self._placed[name]
        read = state_fields_for(block.record)
        decoded = tuple(dict.fromkeys((*read, W32)))
        vectors = {each.name: each.shape(parameter.shape) for each in block.rule.vectors}
        shapes = {key: vectors.get(key, parameter.shape) for key in state_keys(block.record)}
        values = {key: torch.empty(shape, dtype=torch.float32, device="cpu").view(-1) for key, shape in shapes.items()}
        groups = groups_of(self._generation, block, parameter.start, parameter.stop, self._group_elements)
        with RecordBuffers(self._pool, decoded, self._group_elements, "training state") as buffers:
            for first, last in groups:
                buffers.read(self._generation, block.index, read, first, last)
                start, stop = max(parameter.start, first), min(parameter.stop, last)
                to, of = slice(start - parameter.start, stop - parameter.start), slice(start - first, stop - first)
                for key, part in decode_state(block.record, buffers.tensors(decoded, last - first)).items():
                    if key in vectors:  # read with the first group
                        values[key].copy_(part)
                    else:
                        values[key][to] = part[of]
        state = {key: each.reshape(shapes[key]) for key, each in values.items()}
        if name in self._quantised:
            form = self._quantised[name]
            state["weight"] = dequantised(state["weight"].to(torch.uint8), form.layout, form.dtype).float()
        if block.is_trained:
            state["step"] = torch.tensor(self._generation.progress.updates, dtype=torch.float32, device="cpu")
        return state
