"""What a run of several ranks does not have. Light: `ratel plan` asks, too."""

from __future__ import annotations

from ratel_cli.config.schema import RunConfig
from ratel_cli.engine.ranks.launched import OfAllRanks


def reject_unsupported(config: RunConfig, num_ranks: int) -> None:
    """Raise OfAllRanks for what is not supported with several ranks, and for a step that they cannot share equally."""
    if config.tokens_per_step is not None:
        micro_batch_size = 1 if config.split is None else config.split[0]
        if config.sequences_per_step % (num_ranks * micro_batch_size):
            least = num_ranks * micro_batch_size * config.sequence_len
            raise OfAllRanks(
                f"tokens_per_step: {config.tokens_per_step} tokens are not the same number of micro-batches for each "
                f"of {num_ranks} ranks",
                f"set it to a multiple of {least}",
            )
    if config.storage.snapshot is not None:
        raise OfAllRanks("storage.snapshot is not supported with several ranks", "remove it")
    if config.storage.durability == "none":
        raise OfAllRanks(
            "storage.durability: none is not supported with several ranks: one that ends would cost the stores of all",
            "set storage.durability: step",
        )
