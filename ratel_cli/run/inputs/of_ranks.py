"""Features that are rejected with several ranks. Imports no torch: `ratel plan` asks, too."""

from __future__ import annotations

from ratel_cli.config.keys.schema import RunConfig
from ratel_cli.engine.ranks.launched import OfAllRanks
from ratel_cli.units import counted


def reject_unsupported(config: RunConfig, num_ranks: int) -> None:
    """Raise OfAllRanks for what is not supported with several ranks, and for a step that they cannot share equally."""
    if config.tokens_per_step is not None:
        number = config.sequences_per_step if config.split is None else config.split[1]
        if number % num_ranks:
            what = (
                counted(number, "sequence") if config.split is None else counted(number, "micro-batch", "micro-batches")
            )
            raise OfAllRanks(
                f"tokens_per_step: {config.tokens_per_step} tokens are {what}, which {num_ranks} ranks cannot share "
                "equally",
                f"set it so that they are a multiple of {num_ranks}, or use another number of ranks",
            )
    if config.storage.durability == "none":
        raise OfAllRanks(
            "storage.durability: none is not supported with several ranks: one rank that fails would cost all stores",
            "set storage.durability: step",
        )
