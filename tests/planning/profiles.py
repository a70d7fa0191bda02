"""Models' profiles as values, by shape or by chance; for tests of what is pure."""

from __future__ import annotations

import random

from ratel_cli.model.values.spec import LayerTraits, ModelSpec
from ratel_cli.planning.profile.analytic import analytic_profile
from ratel_cli.planning.profile.model_profile import LayerProfile, ModelProfile, RestCosts, SwapCandidate
from ratel_cli.planning.profile.placement import Workload
from tests.planning.shapes import WORKLOAD


def estimated(spec: ModelSpec, workload: Workload = WORKLOAD) -> ModelProfile:
    """As from its config.json."""
    return analytic_profile(spec, workload, traits=LayerTraits(num_heads=4, head_dim=spec.hidden_size // 4))


def candidate(
    *,
    num_bytes: int = 1,
    flops: int = 1,
    seconds: float | None = None,
    operator: str = "",
    key: str = "",
    held_bytes: int = 0,
) -> SwapCandidate:
    return SwapCandidate(
        operator=operator, key=key, num_bytes=num_bytes, flops=flops, seconds=seconds, held_bytes=held_bytes
    )


def layer(
    *candidates: SwapCandidate, input_bytes: int = 4096, flops: int | None = None, rests: tuple[RestCosts, ...] = ()
) -> LayerProfile:
    """A layer whose candidates are all that is recomputed."""
    recomputed = sum(item.flops for item in candidates)
    return LayerProfile(
        input_bytes=input_bytes,
        saved_bytes=input_bytes + sum(item.num_bytes for item in candidates),
        forward_bytes=2 * input_bytes,
        forward_held_bytes=2 * input_bytes + sum(item.held_bytes for item in candidates),
        backward_bytes=sum(item.num_bytes for item in candidates) + 3 * input_bytes,
        making_bytes=sum(item.num_bytes for item in candidates) + 2 * input_bytes,
        replay_bytes=sum(item.num_bytes for item in candidates) + input_bytes,
        replay_held_bytes=sum(item.num_bytes for item in candidates) + 4 * input_bytes,
        flops_forward=recomputed if flops is None else flops,
        flops_recomputed=recomputed,
        candidates=candidates,
        rests=rests,
    )


def model(
    *profiles: LayerProfile, layers: tuple[int, ...] = (0,), flops_head: int = 0, norm_bytes: int = 0
) -> ModelProfile:
    return ModelProfile(
        source="analytic",
        profiles=profiles,
        layers=layers,
        micro_batch_tokens=WORKLOAD.micro_batch_tokens,
        sequence_len=WORKLOAD.sequence_len,
        flops_head=flops_head,
        norm_held_bytes=norm_bytes // 2,
        norm_bytes=norm_bytes,
    )


def by_chance(choice: random.Random, *, num_layers: int, most_kib: int = 64, most_flops: int = 10**9) -> ModelProfile:
    """One or two kinds of layers, each with up to five candidates."""

    def kind() -> LayerProfile:
        sizes = [choice.randint(1, most_kib) * 1024 for _ in range(choice.randint(0, 5))]
        items = [
            candidate(
                num_bytes=size, flops=choice.randint(0, most_flops), key=f"op#{n}", held_bytes=choice.choice([0, size])
            )
            for n, size in enumerate(sizes)
        ]
        items.sort(key=lambda item: -item.flops / item.num_bytes)
        input_bytes, flops = choice.randint(1, most_kib) * 1024, sum(item.flops for item in items)
        rests = tuple(
            RestCosts(after=name, num_bytes=int(share * (sum(sizes) + 3 * input_bytes)), flops=int(share * 2 * flops))
            for name, share in (("up", choice.uniform(0.5, 1)), ("qkv", choice.uniform(0, 0.5)))
        )
        return layer(*items, input_bytes=input_bytes, rests=rests[: choice.randint(0, 2)])

    number = choice.randint(1, 2)
    layers = tuple(choice.randrange(number) for _ in range(num_layers))
    return model(
        *(kind() for _ in range(number)),
        layers=layers,
        flops_head=choice.randint(0, most_flops),
        norm_bytes=choice.randint(0, most_kib) * 1024,
    )
