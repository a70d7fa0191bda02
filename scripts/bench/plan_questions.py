"""What a plan of a model costs of which only the config.json is here: ten questions, processor seconds of each.

    python -m scripts.bench.plan_questions [N ...]

Each question is one `ratel plan MODEL` in a process of its own, imports included, with an empty cache. The promise is
5 processor seconds each. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.common_cases import models

_PROMISE = 5.0
_DESK = ("--gpu", "rtx4090", "--ram", "64GB", "--ssd", "2x990pro")
_NF4 = ("adapter=lora", "load_in_4bit=true")
_QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Llama-3.1-8B", _DESK),
    ("Llama-3.1-8B", (*_DESK, "adapter=lora")),
    ("Llama-3.1-8B", (*_DESK, *_NF4)),
    ("Qwen3-14B", ("--gpu", "rtx5090", "--ram", "128GB", "--ssd", "2x9100pro")),
    ("Qwen3-14B", (*_DESK, "adapter=lora")),
    ("Qwen3-14B", ("--gpu", "rtx4060ti", "--ram", "64GB", "--ssd", "sn850x", *_NF4)),
    ("Qwen3-32B", ("--gpu", "rtx3090", "--ram", "128GB", "--ssd", "2x980pro")),
    ("Llama-3.1-70B", ("--gpu", "rtx4090", "--ram", "128GB", "--ssd", "4x990pro")),
    ("Llama-3.1-70B", (*_DESK, "adapter=lora")),
    ("Llama-3.1-70B", (*_DESK, *_NF4)),
)


def main() -> None:
    """Ask, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("numbers", type=int, nargs="*", help="which questions, from 1 on; all where none is named")
    numbers = parser.parse_args().numbers or range(1, len(_QUESTIONS) + 1)
    found = []
    with tempfile.TemporaryDirectory(prefix="ratel-questions-") as directory:
        for name, config in models().items():
            config.save_pretrained(Path(directory) / name)
        for number in numbers:
            model, options = _QUESTIONS[number - 1]
            environment = {**os.environ, "XDG_CACHE_HOME": str(Path(directory) / f"cache-{number}")}
            asked = [sys.executable, "-m", "ratel_cli", "plan", model, *options, "--json"]
            before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            ended = subprocess.run(
                asked,
                cwd=directory,
                env=environment,
                capture_output=True,
                check=False,
                text=True,
            )
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found.append(
                {"question": [model, *options], "cpu_seconds": used, "seconds": seconds, "rc": ended.returncode}
            )
            shown = "" if ended.returncode in (0, 3) else f"  {ended.stderr.strip()[-200:]}"
            kept = "kept" if used <= _PROMISE else "missed"
            print(
                f"{number:2}  {used:5.1f} CPU s  {kept}  rc {ended.returncode}  {model} {' '.join(options)}{shown}",
                flush=True,
            )
    print(json.dumps({"promise_cpu_seconds": _PROMISE, "questions": found}))


if __name__ == "__main__":
    main()
