"""Collects what a machine with a GPU and without a package index needs, in one folder of less than 64 MiB.

    python -m scripts.gpu_kit.wheels .wheels [--cuda 130] [--interpreter python3.12] [--there FILE]

That machine has Python 3.12, torch, and an older transformers. Versions are those of `.constraints.txt`. What a wheel
needs and the machine lacks comes along. bitsandbytes is packed anew with the library of one CUDA version, and the
kernels are compiled if an interpreter of that version, with its headers, is at hand. `scripts/gpu_kit/set_up.py` takes
the folder there. `--there`: what the machine has, as `pip list --format=freeze` prints it there.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from email.parser import HeaderParser
from pathlib import Path
from typing import cast

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from ratel_cli.units import MIB

ROOT = Path(__file__).parents[2]
MOST_BYTES = 64 * MIB
PYTHON = "3.12"
NEEDED = (
    "transformers", "tokenizers", "huggingface-hub", "hf-xet", "peft", "datasets", "pydantic", "plotext", "ijson",
    "pytest", "pytest-random-order", "pytest-rerunfailures", "pytest-timeout", "pytest-xdist", "hypothesis",
    "trl", "compressed-tensors", "liger-kernel",
)  # fmt: skip
"""Of these the machine has none, or an older version."""
_REPACKED = "bitsandbytes"
_THERE = frozenset(
    (
        "accelerate", "annotated-doc", "annotated-types", "anyio", "certifi", "click", "cmake", "filelock", "fsspec",
        "jinja2", "markdown-it-py", "nanobind", "networkx", "ninja", "numpy", "packaging", "pandas",
        "psutil", "pyarrow", "pygments", "pyyaml", "regex", "requests", "rich", "safetensors", "scipy", "shellingham",
        "sympy", "torch", "tqdm", "triton", "typer", "typing-extensions", "xxhash",
    )
)  # fmt: skip
"""What comes with torch, transformers and the usual tools, where `--there` does not say it."""
_PLATFORMS = [f"manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 26, 24, 17)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
_LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(?:cuda|rocm|xpu|hip)\w*\.so")


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the folder, and print what is in it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuda", default="130", help="the CUDA version of the machine's torch, without a point")
    parser.add_argument("--interpreter", default=f"python{PYTHON}", help="compiles the kernels, if it is there")
    parser.add_argument("--there", type=Path, default=None, help="what the machine has, from `pip list`")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    there = _THERE if options.there is None else set(_names_in(options.there.read_text(encoding="utf-8")))
    collect(options.folder, there)
    if not list(options.folder.glob(f"{_REPACKED}-*.whl")):
        with tempfile.TemporaryDirectory() as directory:
            download([_pinned(_REPACKED)], Path(directory))
            [wheel] = Path(directory).glob("*.whl")
            repack(wheel, options.folder / wheel.name, cuda=options.cuda)
    print(_compiled(options.folder, options.interpreter))
    sys.exit(report(options.folder))


def collect(folder: Path, there: Collection[str]) -> None:
    """Download what is needed, and what that needs, until nothing is missing."""
    wanted = [_pinned(name) for name in NEEDED if not _has(folder, name)]
    while wanted := wanted or sorted(missing(folder, there)):
        download(wanted, folder)
        wanted = []


def missing(folder: Path, there: Collection[str]) -> set[str]:
    """What the folder's wheels need, as pip wants it, and neither the folder nor the machine has."""
    needed = [each for wheel in folder.glob("*.whl") for each in needs(wheel)]
    found = dict[str, str]()
    for each in needed:
        name = canonicalize_name(each.name)
        if name not in there and not _has(folder, name):
            # The versions of pydantic and its core are one.
            exact = next((part.version for part in each.specifier if part.operator == "=="), None)
            found[name] = _pinned(name) if exact is None else f"{name}=={exact}"
    return set(found.values())


def needs(wheel: Path) -> Iterator[Requirement]:
    """What a wheel needs on the machine, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
    machine: dict[str, str | AbstractSet[str]] = {
        **cast(dict[str, str], default_environment()), "python_version": PYTHON, "python_full_version": f"{PYTHON}.0",
        "sys_platform": "linux", "platform_machine": "x86_64", "platform_system": "Linux", "extra": "",
    }  # fmt: skip
    for line in headers.get_all("Requires-Dist") or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(machine):
            yield requirement


def download(requirements: Sequence[str], folder: Path) -> None:
    """Wheels of exactly these, for the machine's Python. Raises CalledProcessError with pip's words on stderr."""
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder),
    ]  # fmt: skip
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *requirements], check=True)


def repack(wheel: Path, target: Path, *, cuda: str) -> None:
    """The same wheel without the libraries of other CUDA versions and other GPUs.

    Raises SystemExit if it has none for this one.
    """
    kept = f"bitsandbytes/libbitsandbytes_cuda{cuda}.so"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if kept not in names:
            found = ", ".join(name for name in names if _LIBRARY.fullmatch(name))
            sys.exit(f"{wheel.name} has no library for CUDA {cuda}; it has {found}")
        dropped = {name for name in names if _LIBRARY.fullmatch(name) and name != kept}
        written = target.with_suffix(".new")
        with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as packed:
            for name in names:
                if name in dropped:
                    continue
                content = archive.read(name)
                if name.endswith(".dist-info/RECORD"):
                    lines = content.decode().splitlines(keepends=True)
                    content = "".join(line for line in lines if line.split(",")[0] not in dropped).encode()
                packed.writestr(archive.getinfo(name), content, zipfile.ZIP_DEFLATED)
    written.replace(target)


def report(folder: Path) -> int:
    """Print each file with its size. 1 if together they are too large."""
    files = sorted(folder.iterdir(), key=lambda file: -file.stat().st_size)
    for file in files:
        print(f"{file.stat().st_size / MIB:8.2f} MiB  {file.name}")
    total = sum(file.stat().st_size for file in files)
    print(f"{total / MIB:8.2f} MiB  in {len(files)} files; at most {MOST_BYTES // MIB} MiB")
    return int(total > MOST_BYTES)


def _compiled(folder: Path, interpreter: str) -> str:
    """Compile the kernels for the machine's Python, if that is at hand; what became of it, in a sentence."""
    found = shutil.which(interpreter)
    version = subprocess.run(
        [found or sys.executable, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    if found is None or version != PYTHON:
        return f"kernels: no {interpreter} here; set_up.py compiles them there"
    tree = Path(tempfile.mkdtemp(prefix="gpu-kit-kernels-"))
    try:
        nanobind = subprocess.run(
            [sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True
        ).stdout.strip()
        cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or "cmake"
        configure = [
            cmake, "-S", str(ROOT / "kernels"), "-B", str(tree), "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={found}", f"-Dnanobind_DIR={nanobind}",
        ]  # fmt: skip
        for command in (configure, [cmake, "--build", str(tree), "-j", "2"]):
            finished = subprocess.run(command, capture_output=True, text=True, check=False)
            if finished.returncode:
                words = (finished.stderr.strip() or finished.stdout.strip()).splitlines() or ["nothing"]
                return f"kernels: not compiled, set_up.py does it there: {words[-1]}"
        [module] = tree.rglob("_native*.so")
        shutil.copy(module, folder / module.name)
        return f"kernels: {module.name}"
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def _pinned(name: str) -> str:
    """As pip wants it: with the version of `.constraints.txt`, if that has one."""
    for line in (ROOT / ".constraints.txt").read_text(encoding="utf-8").splitlines():
        known, _, version = line.partition("==")
        if canonicalize_name(known) == name and version:
            return f"{name}=={version.strip()}"
    return name


def _has(folder: Path, name: str) -> bool:
    return any(parse_wheel_filename(wheel.name)[0] == name for wheel in folder.glob("*.whl"))


def _names_in(listing: str) -> Iterator[str]:
    for line in listing.splitlines():
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name:
            yield canonicalize_name(name.group())


if __name__ == "__main__":
    main()
