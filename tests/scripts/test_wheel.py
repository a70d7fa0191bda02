"""What a release would run: a source archive, the wheel that is made of it, and both of it outside of the clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.release import build_sdist, build_wheel
from tests.e2e.runs import save_base

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that sees nothing of the clone."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.nightly
def test_a_wheel_from_the_source_archive_works_outside_of_the_clone(tmp_path: Path) -> None:
    # 1. the source archive, and a wheel that is made of nothing else; both have what they need and no more
    wheel = build_wheel(build_sdist(tmp_path), tmp_path)

    # 2. an environment of its own, which has of the clone's nothing but what Ratel depends on
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    packages = tmp_path / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python, ratel = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "ratel"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--python", python, "install", "--no-deps", "--force-reinstall", wheel, cwd=tmp_path)
    assert run(python, "-c", "import ratel_cli; print(ratel_cli.__file__)", cwd=tmp_path).startswith(str(packages))

    # 3. the command, the demo's files and config, a shape that the wheel brings, and the library
    assert "finetune" in run(ratel, "--help", cwd=tmp_path)
    code = "from ratel_cli.run.start.demo import *; from pathlib import Path; d = Path('demo'); write_base(d)"
    run(python, "-c", f"{code}; write_config(d)", cwd=tmp_path)
    run(ratel, "finetune", "demo/demo.yaml", "max_steps=2", cwd=tmp_path)
    assert (tmp_path / "demo" / "output" / "model.safetensors").exists()
    assert "gpt-13b" in run(ratel, "plan", "gpt-13b", "--gpu", "rtx4090", cwd=tmp_path)
    (tmp_path / "own_loop.py").write_text((ROOT / "examples" / "own_loop.py").read_text())
    (tmp_path / "text").write_text("A step is committed when the next one computes. " * 40)
    sizes = ["--steps", "2", "--tokens", "16", "--micro-batches", "1"]
    base, storage = save_base(tmp_path / "base"), ["--storage", "state", "--output", "out"]
    output = run(python, "own_loop.py", base, "text", *storage, *sizes, cwd=tmp_path)
    assert output.count("step ") == 2 and (tmp_path / "out" / "model.safetensors").exists()
