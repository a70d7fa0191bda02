"""Installed packages that do not load: commands go on without them, or name them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from ratel_cli import neighbours
from ratel_cli.cli.app import main
from ratel_cli.errors import BadInput
from ratel_cli.neighbours import WITHOUT, BrokenPackage, broken_package, missed_package, packages_that_fail
from tests.e2e.conftest import MakeConfig
from tests.e2e.runs import ratel_command
from tests.tiers import sample

REASON = "operator torchvision::nms does not exist"
PACKAGES = (
    "torchvision", "accelerate", "scipy", "PIL", "torchao", "torchaudio", "sentencepiece", "triton", "psutil",
    "sklearn", "pandas", "numba", "librosa", "cv2", "timm", "xformers", "flash_attn", "deepspeed", "apex", "optimum",
    "kernels", "liger_kernel", "bitsandbytes", "gguf", "soundfile", "tensorboard", "wandb", "mlflow", "diffusers",
    "matplotlib",
)  # fmt: skip
"""What users have beside it. A full fine-tuning of text needs none of them."""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of packages that is looked into first. Modules of the test are forgotten after it."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    before = dict(sys.modules)
    yield path
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]


def install(site: Path, name: str, code: str, *, version: str = "0.1.0") -> None:
    """A package, as pip leaves one."""
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(code)
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{name}\n")


def error_of(act: Callable[[], object]) -> Exception:
    try:
        act()
    except Exception as error:  # noqa: BLE001 - each kind is looked at
        return error
    raise AssertionError("nothing was raised")


def test_the_package_whose_import_fails_is_found(site: Path) -> None:
    install(site, "inner", f"raise RuntimeError({REASON!r})\n")
    install(
        site, "outer", "try:\n    import inner\nexcept RuntimeError as error:\n    raise ImportError('no') from error\n"
    )
    install(site, "healthy", "def fail(): raise ValueError('of a call')\n")
    found = broken_package(error_of(lambda: import_module("outer")))
    assert found == BrokenPackage("inner", REASON)
    assert found.words == f"inner 0.1.0 is installed, but cannot be imported: {REASON}"
    assert "install --force-reinstall inner; or uninstall it" in found.remedy
    assert broken_package(error_of(lambda: import_module("healthy").fail())) is None
    assert broken_package(ImportError("no import of a package")) is None
    assert broken_package(error_of(lambda: import_module("no_such_package"))) is None


def test_what_the_machine_lacks_is_no_fault_of_a_package(site: Path) -> None:
    for name, raised in (("files", f"OSError({errno.EMFILE}, 'too many')"), ("memory", "MemoryError()")):
        install(site, name, f"raise {raised}\n")
        assert broken_package(error_of(partial(import_module, name))) is None
    install(site, "library", "raise OSError('libx.so: cannot open shared object file')\n")
    found = broken_package(error_of(lambda: import_module("library")))
    assert found is not None and found.reason.startswith("libx.so")


def test_what_is_missed_is_named_by_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WITHOUT, "psutil no library\naccelerate No module named 'psutil'\nscipy other")
    missed = missed_package(ImportError("No module named 'accelerate'"))
    assert missed == BrokenPackage("psutil", "no library")
    assert missed_package(ImportError("needs scipy")) == BrokenPackage("scipy", "other")
    assert missed_package(ValueError("scipy")) is None and missed_package(BadInput("accelerate")) is None


def test_what_fails_is_tried_even_if_it_ends_the_process(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "broken", "raise SystemExit('for a reason')\n")
    install(site, "crashes", "import os\nos._exit(7)\n")
    install(site, "fine", "print('noise')\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(neighbours, "NEIGHBOURS", ("fine", "crashes", "broken", "no_such_package", "fine"))
    assert packages_that_fail() == [
        BrokenPackage("crashes", "its import ends the process, exit code 7"),
        BrokenPackage("broken", "for a reason"),
    ]


def test_a_command_called_by_a_program_does_not_start_again(
    site: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process is not the command's own."""
    install(site, "yaml_of_others", f"raise RuntimeError({REASON!r})\n")
    monkeypatch.setattr("ratel_cli.cli.check.run", lambda *_, **__: __import__("yaml_of_others"))
    assert main(["check", str(make_config())]) == 3
    error = capsys.readouterr().err
    assert "yaml_of_others 0.1.0 is installed, but cannot be imported" in error and "--force-reinstall" in error


@pytest.mark.full
@pytest.mark.parametrize("name", sample(PACKAGES, every=len(PACKAGES)))
def test_training_goes_on_without(site: Path, make_config: MakeConfig, name: str) -> None:
    install(site, name, f"raise RuntimeError({REASON!r})\n", version="9.9.9")
    ended = run(site, "finetune", make_config(), "max_steps=1")
    assert ended.returncode == 0, ended.stderr
    assert "bug" not in ended.stderr
    assert f"{name} 9.9.9 is installed, but cannot be imported" in ended.stderr or REASON not in ended.stderr


@pytest.mark.full
def test_who_needs_it_names_it(site: Path, make_config: MakeConfig) -> None:
    install(site, "accelerate", f"raise RuntimeError({REASON!r})\n", version="9.9.9")
    ended = run(site, "finetune", make_config(), "adapter=lora")
    assert ended.returncode == 3, ended.stderr
    assert f"accelerate 9.9.9 is installed, but cannot be imported: {REASON}" in ended.stderr.replace("\n       ", " ")


@pytest.mark.full
def test_the_doctor_names_it(site: Path) -> None:
    install(site, "torchvision", f"raise RuntimeError({REASON!r})\n", version="9.9.9")
    ended = run(site, "doctor", site, "--json")
    assert "torchvision 9.9.9 is installed, but cannot be imported" in ended.stdout, ended.stderr


def run(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "400"}
    command = [str(ratel_command()), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
