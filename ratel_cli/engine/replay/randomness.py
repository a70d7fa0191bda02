"""Every random draw of training is a function of (seed, step, block, micro-batch), and of nothing else.

Resuming after a crash needs no generator state, and the order in which blocks run does not matter.
"""

from __future__ import annotations

import hashlib

import torch


def draw_seed(seed: int, *, step: int, block: int, micro_batch: int) -> int:
    """A 63-bit seed for the draws of one block on one micro-batch of one step."""
    key = f"{seed}/{step}/{block}/{micro_batch}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_draws(seed: int, *, step: int, block: int, micro_batch: int) -> None:
    """Set torch's generators (all devices) for the draws that follow."""
    torch.manual_seed(draw_seed(seed, step=step, block=block, micro_batch=micro_batch))
