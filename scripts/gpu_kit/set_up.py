"""Sets up a machine that has a GPU and torch, and no package index: run by that machine's own Python.

    python3 scripts/gpu_kit/set_up.py .wheels [--site /tmp/ratel-site]

It installs the wheels that `scripts/gpu_kit/wheels.py` collected into a directory of their own; takes the compiled
kernels from the folder, or compiles them; and makes the interpreter find both in every process that it starts, whatever
its environment: by a `.pth` file. A `ratel` beside the interpreter starts the program, as tests do.

Invariant: nothing that was installed before is changed, and a `ratel` that someone else has put there stays. Only the
standard library is imported, since nothing else may be there yet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PTH = "ratel-gpu-kit.pth"
_MARK = "# made by scripts/gpu_kit/set_up.py"
_CHECK = (
    "import torch, transformers, peft, ratel_cli, ratel_cli._native;"
    "print('torch', torch.__version__, 'transformers', transformers.__version__, 'peft', peft.__version__,"
    " 'CUDA' if torch.cuda.is_available() else 'no CUDA')"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Install, and say what is there then. Exits with 1 and the reason if something is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="with the wheels")
    parser.add_argument(
        "--site", type=Path, default=Path(tempfile.gettempdir()) / "ratel-site", help="for the packages"
    )
    options = parser.parse_args(arguments)
    install(options.folder, options.site)
    describe_program(options.site)
    print(f"packages: {write_pth(Path(sysconfig.get_path('purelib')), options.site)}")
    print(f"program: {write_program(Path(sys.executable).parent)}")
    print(f"kernels: {put_kernels(options.folder)}")
    checked = _run([sys.executable, "-c", _CHECK], cwd=tempfile.gettempdir())
    if checked.returncode:
        sys.exit(f"the packages cannot be imported: {_last_line(checked)}")
    print(checked.stdout.strip())


def install(folder: Path, site: Path) -> None:
    """Unpack the wheels into `site`, without a package index."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        sys.exit(f"{folder} has no wheels: run `python -m scripts.gpu_kit.wheels {folder}` where there is an index")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
        "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(site),
    ]  # fmt: skip
    installed = _run([*command, *wheels])
    if installed.returncode:
        sys.exit(f"pip could not install the wheels: {_last_line(installed)}")


def describe_program(site: Path) -> None:
    """Let the program be a package with a version, as if it were installed."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    directory = site / f"ratel_cli-{version}.dist-info"
    directory.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: ratel-cli\nVersion: {version}\n"
    (directory / "METADATA").write_text(text, encoding="utf-8")


def write_pth(purelib: Path, site: Path) -> Path:
    """Let the interpreter look into `site` first, then into the repository. A plain path would come behind the older
    packages that the machine has."""
    path = purelib / PTH
    path.write_text(f"import sys; sys.path[:0] = {[str(site), str(ROOT)]!r}\n", encoding="utf-8")
    return path


def write_program(directory: Path) -> str:
    """`ratel`, beside the interpreter."""
    path = directory / "ratel"
    if path.exists() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return f"{path} was there, and stays"
    lines = [f"#!{sys.executable}", _MARK, "import sys", "from ratel_cli.cli.app import main", "sys.exit(main())", ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def put_kernels(folder: Path) -> str:
    """The compiled module beside the package: the folder's if it works here, else one that is compiled here."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = ROOT / "ratel_cli" / f"_native{suffix}"
    if target.exists() and _can_import():
        return f"{target.name} was there"
    carried = folder / target.name
    if carried.exists():
        shutil.copy(carried, target)
        if _can_import():
            return f"{target.name} of {folder}"
        target.unlink()
    return _compiled(target)


def _compiled(target: Path) -> str:
    tree = Path(tempfile.mkdtemp(prefix="ratel-kernels-"))
    nanobind = _run([sys.executable, "-m", "nanobind", "--cmake_dir"]).stdout.strip()
    configure = ["cmake", "-S", str(ROOT / "kernels"), "-B", str(tree), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"]
    for command in (configure, ["cmake", "--build", str(tree), "-j", str(os.cpu_count() or 1)]):
        finished = _run(command)
        if finished.returncode:
            sys.exit(f"the kernels could not be compiled: {_last_line(finished)}")
    [module] = tree.rglob("_native*.so")
    shutil.copy(module, target)
    if not _can_import():
        sys.exit(f"the kernels were compiled, but {target.name} cannot be imported")
    return f"{target.name}, compiled here"


def _can_import() -> bool:
    path = str(ROOT / "ratel_cli")
    return _run([sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); import _native"]).returncode == 0


def _run(command: Sequence[str], *, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")


def _last_line(finished: subprocess.CompletedProcess[str]) -> str:
    lines = (finished.stderr.strip() or finished.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {finished.returncode}"


if __name__ == "__main__":
    main()
