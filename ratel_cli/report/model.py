"""The words of a model's profile: what its layers cost, and what offloading each operator's output would save.

Invariant: nothing is computed here except sums, and nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratel_cli.planning.model_profile import LayerProfile, ModelProfile
from ratel_cli.report.plan import aligned
from ratel_cli.units import counted, format_bytes, format_count, format_seconds


def model_rows(profile: ModelProfile, *, available_bytes: int) -> list[tuple[str, str]]:
    """Rows about one micro-batch. `available_bytes` is the host memory that a run has left for activations."""
    layers = [profile.profiles[number] for number in profile.layers]
    inputs, saved = sum(layer.input_bytes for layer in layers), sum(layer.saved_bytes for layer in layers)
    flops = sum(layer.flops_forward for layer in layers) + profile.flops_head
    return [
        ("micro-batch", f"{profile.micro_batch_tokens} tokens; forward {format_count(flops)}FLOP"),
        ("layers", _seconds(layers)),
        ("other blocks", f"embedding {_time(profile.embedding_seconds)}, head and loss {_time(profile.head_seconds)}"),
        ("activations", f"{format_bytes(saved)} in all, {format_bytes(inputs)} of it inputs of layers"),
        ("available", f"{format_bytes(available_bytes)} of RAM for activations in a run"),
    ]


def operator_lines(profile: ModelProfile) -> list[str]:
    """For each kind of layer, a table of its operators. The operator that saves most per byte comes first."""
    lines = []
    for number, layer in enumerate(profile.profiles):
        count = profile.layers.count(number)
        which = f"{count} of {counted(len(profile.layers), 'layer')}"
        lines.append(f"operators worth offloading in {which}, for one layer and micro-batch:")
        rows = [
            (each.operator, format_bytes(each.num_bytes), f"{format_count(each.flops)}FLOP", _time(each.seconds))
            for each in layer.candidates
        ]
        lines += aligned([("operator", "output", "saves", "time"), *rows])
    return lines


def _seconds(layers: Sequence[LayerProfile]) -> str:
    forward = sum(layer.forward_seconds or 0.0 for layer in layers)
    recomputed = sum(layer.recomputed_seconds or 0.0 for layer in layers)
    backward = sum(layer.backward_seconds or 0.0 for layer in layers)
    return (
        f"{counted(len(layers), 'layer')} of {counted(len({id(layer) for layer in layers}), 'kind')}: "
        f"forward {format_seconds(forward)}, recomputation {format_seconds(recomputed)}, "
        f"backward {format_seconds(backward)}"
    )


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else format_seconds(seconds)
