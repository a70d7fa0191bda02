"""What a release would run: a source archive, the wheel that is made of it, and both of it outside of the clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.e2e.runs import save_base

ROOT = Path(__file__).parents[2]
_OLDEST_LIBC = (2, 17)
"""That of manylinux2014: a wheel that is built on its image runs wherever torch runs."""


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
    # 1. the source archive, and a wheel that is made of nothing else
    build = f"from scikit_build_core.build import build_sdist; build_sdist('{tmp_path}')"
    run(sys.executable, "-c", build, cwd=ROOT)
    [archive] = tmp_path.glob("ratel_cli-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "source", filter="data")
    [source] = (tmp_path / "source").iterdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source, cwd=tmp_path)
    [wheel] = tmp_path.glob("*.whl")

    # 2. nothing newer than an old libc, and no file of the clone that does not belong there
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        [native] = [name for name in names if name.startswith("ratel_cli/_native") and name.endswith(".so")]
        versions = {
            tuple(map(int, each.split(b"."))) for each in re.findall(rb"GLIBC_([0-9.]+)\0", packed.read(native))
        }
    assert versions and max(versions) <= _OLDEST_LIBC
    assert {name.split("/")[0] for name in names} == {"ratel_cli", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}

    # 3. an environment of its own, which has of the clone's nothing but what Ratel depends on
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    packages = tmp_path / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    python, ratel = tmp_path / "env" / "bin" / "python", tmp_path / "env" / "bin" / "ratel"
    run(*pip, "--python", python, "install", "--no-deps", "--force-reinstall", wheel, cwd=tmp_path)
    assert run(python, "-c", "import ratel_cli; print(ratel_cli.__file__)", cwd=tmp_path).startswith(str(packages))

    # 4. the command, the demo's config and the library
    assert "finetune" in run(ratel, "--help", cwd=tmp_path)
    run(sys.executable, ROOT / "scripts" / "make_demo.py", tmp_path / "demo", cwd=ROOT)
    config = (ROOT / "configs" / "demo.yaml").read_text()
    (tmp_path / "demo.yaml").write_text(config)
    run(ratel, "finetune", "demo.yaml", "max_steps=2", cwd=tmp_path)
    assert (tmp_path / "demo" / "output" / "model.safetensors").exists()
    (tmp_path / "own_loop.py").write_text((ROOT / "examples" / "own_loop.py").read_text())
    (tmp_path / "text").write_text("A step is committed when the next one computes. " * 40)
    sizes = ["--steps", "2", "--tokens", "16", "--micro-batches", "1"]
    base, storage = save_base(tmp_path / "base"), ["--storage", "state", "--output", "out"]
    output = run(python, "own_loop.py", base, "text", *storage, *sizes, cwd=tmp_path)
    assert output.count("step ") == 2 and (tmp_path / "out" / "model.safetensors").exists()
