"""The parts of the kit, in the order in which they run: what decides most comes before what can be left out.

Each has a time box for an H200; together they take 585 s at most, of ten minutes.
"""

from __future__ import annotations

from scripts.gpu_kit.boxes import Part

_LAYERS = "scripts.gpu_kit.layers"
_STEPS = "scripts.gpu_kit.steps"
PARTS = (
    Part(name="machine", seconds=20, function="scripts.gpu_kit.machine:find_machine"),
    Part(name="tests", seconds=90, function="scripts.gpu_kit.machine:run_tests"),
    Part(name="yardstick", seconds=40, function="scripts.gpu_kit.machine:measure_yardstick"),
    Part(name="layer", seconds=35, function=f"{_LAYERS}:measure_layer"),
    Part(name="masks", seconds=35, function=f"{_LAYERS}:measure_masks"),
    Part(name="steps", seconds=130, function=f"{_STEPS}:measure_packed"),
    Part(name="adapters", seconds=60, function=f"{_STEPS}:measure_adapters"),
    Part(name="quantised", seconds=15, function=f"{_LAYERS}:measure_quantised"),
    Part(name="small", seconds=30, function=f"{_STEPS}:measure_small"),
    Part(name="fused", seconds=45, function=f"{_LAYERS}:measure_remedies"),
    Part(name="long", seconds=45, function=f"{_STEPS}:measure_long"),
    Part(name="memory", seconds=40, function=f"{_STEPS}:measure_little_memory"),
)
BY_NAME = {part.name: part for part in PARTS}
ALL_SECONDS = sum(part.seconds for part in PARTS)
