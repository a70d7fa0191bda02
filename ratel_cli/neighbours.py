"""Installed packages that do not load, and commands that go on without them.

transformers, torch and PEFT import what else is installed, though a run may not need it: a torchvision that does not
fit torch fails for every model. Whether a package loads shows when it is imported, which takes seconds for some, so
nothing is tried beforehand: a command that fails starts again, in the same process, as if the package were not there.

Invariant: a command that needs the package names it, with the reason why it does not load and what to do.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Final, NoReturn

from ratel_cli.commands import pip_install
from ratel_cli.errors import EnvironmentFailure, first_line, printable

WITHOUT: Final = "RATEL_WITHOUT_PACKAGES"
"""The environment variable that names what this process and its children go without: a line for each, with the name in
imports, a space, and the reason."""
_NEEDED: Final = frozenset({"torch", "transformers"})
"""Every command that computes needs these."""
_OF_MACHINE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EIO)
"""Errors of an import that say nothing about the package."""

_TRIED: Final = "ratel: "
_TRY: Final = f"""
import importlib, sys, warnings
warnings.simplefilter("ignore")
for name in sys.argv[1:]:
    reason = ""
    try:
        importlib.import_module(name)
    except BaseException as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    print("{_TRIED}" + name, reason, flush=True)
"""
NEIGHBOURS: Final = (
    "accelerate", "apex", "bitsandbytes", "compressed_tensors", "cv2", "datasets", "deepspeed", "diffusers",
    "flash_attn", "gguf", "kernels", "librosa", "liger_kernel", "matplotlib", "mistral_common", "numba", "numpy",
    "optimum", "pandas", "peft", "PIL", "psutil", "pyarrow", "safetensors", "scipy", "sentencepiece", "sklearn",
    "soundfile", "tensorboard", "timm", "tokenizers", "torch", "torchao", "torchaudio", "torchvision", "transformers",
    "triton", "xformers",
)  # fmt: skip
"""What Ratel imports, and what torch, transformers and PEFT import where it is installed."""


@dataclass(frozen=True, slots=True)
class BrokenPackage:
    """An installed package whose import fails."""

    name: str
    """In imports, such as `PIL`."""
    reason: str
    """In one line."""

    @property
    def is_needed(self) -> bool:
        """Whether no command that computes can go without it."""
        return self.name in _NEEDED

    @property
    def words(self) -> str:
        """The sentence about it."""
        found = version_of(self._distribution)
        return f"{self._distribution}{found and f' {found}'} is installed, but cannot be imported: {self.reason}"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        fitting = "" if self.name == "torch" else f" that fits torch {version_of('torch')}"
        install = pip_install(self._distribution).replace(" install ", " install --force-reinstall ")
        return f"install a version{fitting}: {install}" + ("" if self.is_needed else "; or uninstall it")

    @property
    def _distribution(self) -> str:
        """The name that pip knows it by."""
        return (packages_distributions().get(self.name) or [self.name])[0]


def broken_package(error: BaseException) -> BrokenPackage | None:
    """The package whose import has led to this error; None if none has. One that others import comes before them."""
    found: list[BrokenPackage] = []
    for each in _with_causes(error):
        if isinstance(each, MemoryError) or getattr(each, "errno", None) in _OF_MACHINE:
            return None
        for frame, _ in traceback.walk_tb(each.__traceback__):
            name = str(frame.f_globals.get("__name__")).partition(".")[0]
            is_other = name not in {"ratel_cli", "__main__", *sys.stdlib_module_names}
            if frame.f_code.co_name == "<module>" and is_other:  # its import runs
                found.insert(0, BrokenPackage(name, first_line(each)))
    return min(found, key=lambda each: each.is_needed, default=None)


def missed_package(error: BaseException) -> BrokenPackage | None:
    """The package that this process goes without, and that the error says is needed; None if it says no such thing."""
    said = " ".join(str(each) for each in _with_causes(error) if isinstance(each, ImportError))
    missed = None
    for package in reversed(left_out()):  # what was found to be broken later may need what was before
        if re.search(rf"\b{package.name}\b", said):
            missed, said = package, package.reason
    return missed


def left_out() -> list[BrokenPackage]:
    """The packages that this process goes without."""
    lines = (line.partition(" ") for line in os.environ.get(WITHOUT, "").splitlines())
    return [BrokenPackage(name, reason) for name, _, reason in lines]


def leave_out() -> None:
    """Let an import of what this process goes without find nothing."""
    for package in left_out():
        sys.modules[package.name] = None  # type: ignore[assignment]


def can_start_without(package: BrokenPackage) -> bool:
    """Whether the command may do without the package, has not tried that, and has not read its input already."""
    tried = any(each.name == package.name for each in left_out())
    return not (package.is_needed or tried or "-" in sys.argv)


def start_without(package: BrokenPackage) -> NoReturn:
    """Run this command line again, in this process, without the package."""
    sys.stdout.flush()
    os.environ[WITHOUT] = f"{os.environ.get(WITHOUT, '')}\n{package.name} {package.reason}".strip()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def needs_package(package: BrokenPackage) -> EnvironmentFailure:
    """The error of a command that cannot go without it."""
    return EnvironmentFailure(package.words, package.remedy)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what has led to it, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def version_of(distribution: str) -> str:
    """The version of an installed package; an empty string for one that is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def packages_that_fail() -> list[BrokenPackage]:
    """Find the installed neighbours that cannot be imported. They are tried in a process that a crash may end."""
    failed = list[BrokenPackage]()
    waiting = [name for name in NEIGHBOURS if name in sys.modules or find_spec(name) is not None]
    while waiting:
        command = [sys.executable, "-c", _TRY, *waiting]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        lines = [line.removeprefix(_TRIED).partition(" ") for line in ended.stdout.splitlines() if _TRIED in line]
        failed += [BrokenPackage(name, printable(reason)) for name, _, reason in lines if reason]
        waiting = waiting[len(lines) :]
        if waiting:  # the next one ended the process
            failed.append(BrokenPackage(waiting.pop(0), f"its import ends the process, exit code {ended.returncode}"))
    return failed
