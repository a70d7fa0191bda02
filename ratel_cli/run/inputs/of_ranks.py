"""What a run of several ranks does not have. Light: `ratel plan` asks, too."""

from __future__ import annotations

from ratel_cli.config.schema import RunConfig
from ratel_cli.engine.ranks.launched import OfAllRanks


def reject_unsupported(config: RunConfig, *, has_origin: bool = False) -> None:
    """Raise OfAllRanks for what is not supported with several ranks. `has_origin`: the run starts from another one."""
    if has_origin:
        raise OfAllRanks("--from is not supported with several ranks", "leave out --ranks")
    if config.split is None:
        raise OfAllRanks(
            "tokens_per_step is not supported with several ranks",
            "set micro_batch_size and gradient_accumulation_steps, which are those of each rank",
        )
    if config.storage.snapshot is not None:
        raise OfAllRanks("storage.snapshot is not supported with several ranks", "remove it")
    if config.storage.durability == "none":
        raise OfAllRanks(
            "storage.durability: none is not supported with several ranks: one that ends would cost the stores of all",
            "set storage.durability: step",
        )
