"""What Python costs for a unit, one layer on one micro-batch: recording it, repeating a recorded one, replaying it.

Regime: a layer of a Llama so narrow that it computes next to nothing, on one thread. Each contestant runs the layer's
own forward; the plain one does nothing else, and what the others take beyond it is their cost. The floor is a mode of
torch that sees each operator and does nothing about it. Times are CPU time of the thread, interleaved, medians over
rounds. A unit that is repeated is watched only where something is offloaded or drawn. The last line is JSON.

    python -m scripts.bench.unit_python [--rounds N] [--dtype NAME]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratel_cli.engine.replay.repeating import Template, repeater_of, template_of
from ratel_cli.engine.replay.tape import Recorder, Replayer, Tapes
from ratel_cli.model.files.skeleton import DTYPES
from ratel_cli.model.values.operators import OperatorMode, TorchOperator

WIDTH, TOKENS = 64, 16
OFFLOADED = "aten.silu.default#0"
"""The key of an operator whose output is offloaded where a unit that is repeated is watched for it."""
GOALS_MS = {"repeated": 0.8, "watched": 0.8, "replayed": 0.4}
"""Of a unit, beyond what the plain forward takes."""


class _Floor(OperatorMode):
    def intercept(self, func: TorchOperator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return func(*args, **kwargs)


def measure(rounds: int, dtype: torch.dtype) -> dict[str, float]:
    """Milliseconds of CPU time of a unit, by contestant."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=1, num_attention_heads=4
    )
    model = LlamaForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    layer, parameters = model.model.layers[0], list(model.model.layers[0].parameters())
    hidden = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    rotary = model.model.rotary_emb(hidden, torch.arange(TOKENS).unsqueeze(0))
    tapes = Tapes()

    def run() -> None:
        layer(hidden, position_embeddings=rotary)

    def floor() -> None:
        with _Floor():
            run()

    def recorded() -> None:
        recorder = Recorder(parameters)
        with recorder.recording():
            run()
        tapes.put(0, 0, recorder.finish()[0])

    def repeats(swapped: Sequence[str]) -> Callable[[], None]:
        recorder = Recorder(parameters, swapped)
        with recorder.recording():
            run()
        template = template_of(recorder, recorder.finish()[0])
        assert template is not None, "a layer without routers can be repeated"
        return partial(repeated, template)

    recorder = Recorder(parameters)
    with recorder.recording():
        run()
    tape, _ = recorder.finish()

    def repeated(template: Template) -> None:
        repeater = repeater_of(template)
        with repeater.recording():
            run()
        tapes.put_repeated(0, 0, repeater.finish()[0])

    def replayed() -> None:
        with Replayer(tape) as replayer:
            run()
        replayer.check_complete()

    contestants: dict[str, Callable[[], None]] = {
        "plain": run, "floor": floor, "recorded": recorded, "repeated": repeats(()), "watched": repeats([OFFLOADED]),
        "replayed": replayed,
    }  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            start = time.thread_time()
            contestant()
            taken[name].append(time.thread_time() - start)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.rounds, DTYPES[arguments.dtype])
    for name, milliseconds in found.items():
        beyond = "" if name == "plain" else f"   {milliseconds - found['plain']:+.2f} ms"
        goal = f" (the goal is {GOALS_MS[name]})" if name in GOALS_MS else ""
        print(f"{name:<10} {milliseconds:6.2f} ms{beyond}{goal}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
