"""What head and loss take of a GPU's memory, besides weights and hidden states: chunk by chunk of a micro-batch. Pure.

The fp32 sums of the head's gradients over chunks are on the GPU, or in host memory (engine/optimizer/host_sums.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from ratel_cli.model.values.spec import ModelSpec
from ratel_cli.planning.memory.gpu_gradients import largest_bytes, others_leaving_bytes, returned_bytes
from ratel_cli.planning.profile.activations import head_chunk_tokens, logits_bytes, lookup_rows_bytes
from ratel_cli.planning.profile.model_profile import ModelProfile
from ratel_cli.planning.profile.placement import Workload
from ratel_cli.schedule.segments import Segment


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """The head of one model and workload."""

    spec: ModelSpec
    workload: Workload
    profile: ModelProfile

    def passing_bytes(self) -> int:
        """Where host memory has the sums: a chunk's logits; a chunk's gradients, and the logits' that they are made of;
        the final norm's backward; the rounded sum, for its norm. What a head has besides a matrix that it borrows is
        summed on the GPU, but small."""
        head, chunk_tokens = self.spec.head, head_chunk_tokens(self.spec, self.workload)
        sum_bytes = head.sum_bytes if self.spec.tied else 0
        made_bytes = head.made_bytes + chunk_tokens * self.spec.vocab_size * self.spec.dtype_bytes
        shared_bytes = Segment(head.unfinished).sum_bytes + self._leaving_shared_bytes
        return shared_bytes + max(
            sum_bytes + max(logits_bytes(self.spec, chunk_tokens), made_bytes) + self.profile.norm_held_bytes,
            sum_bytes + self.profile.norm_bytes,
            0 if self.spec.tied else returned_bytes(head),
        )

    def summing_bytes(self, waiting_bytes: int) -> int:
        """Where the GPU has the sums. In turn: the chunks; the final norm's backward; the end of a micro-batch, where
        its part of the gradient of a borrowed matrix is added up; then rounding and leaving. `waiting_bytes`: that
        gradient and its rows, until the embedding's is there."""
        head = self.spec.head
        sum_bytes = head.sum_bytes
        micro_batch_bytes = self.workload.micro_batch_tokens * self.spec.hidden_size * self.spec.dtype_bytes
        earlier_bytes = 0
        if self.workload.num_micro_batches > 1:  # the rows of the micro-batch before are leaving
            earlier_bytes = sum_bytes + waiting_bytes - lookup_rows_bytes(self.spec, self.workload)
        computing_bytes = max(
            self._chunks(earlier_bytes) + self.profile.norm_held_bytes,
            max(earlier_bytes, sum_bytes) + self.profile.norm_bytes,
            sum_bytes + waiting_bytes + self.spec.lent.updated_bytes + micro_batch_bytes,
        )
        computing_bytes += self._leaving_shared_bytes
        leaving_bytes = largest_bytes(head) + others_leaving_bytes(head)
        return max(computing_bytes, sum_bytes + waiting_bytes + leaving_bytes)

    @property
    def _leaving_shared_bytes(self) -> int:
        """Partial sums of shared blocks of the micro-batch before, which are leaving."""
        return sum(block.compute_bytes for block in self.spec.head.unfinished)

    def _chunks(self, earlier_bytes: int) -> int:
        """Logits, or gradients of the matrices, and sums; `earlier_bytes`: sums of the micro-batches before.

        That of a borrowed matrix is in the compute dtype after the first chunk, and from the second one on in fp32.
        """
        head = self.spec.head
        chunk_tokens, tokens = head_chunk_tokens(self.spec, self.workload), self.workload.micro_batch_tokens
        num_chunks, last_tokens = -(-tokens // chunk_tokens), tokens % chunk_tokens or chunk_tokens
        sum_bytes, borrowed = max(earlier_bytes, head.sum_bytes), Segment(head.borrowed)
        first_bytes = borrowed.updated_bytes

        def logits(number: int) -> int:
            return logits_bytes(self.spec, chunk_tokens if number < num_chunks else last_tokens)

        moments = [earlier_bytes + logits(1), sum_bytes + head.made_bytes]
        if num_chunks > 1:
            moments += [
                sum_bytes + first_bytes + logits(2),
                sum_bytes + head.made_bytes + first_bytes + borrowed.sum_bytes,
            ]
        if num_chunks > 2:
            moments.append(sum_bytes + borrowed.sum_bytes + logits(3))
        return max(moments)
