"""The machine, the tests of the GPU path on it, and how fast its GPU is: at its best, and all the time."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

from ratel_cli import _native
from ratel_cli.hardware.gpu import compute_device, measure_device, measure_link
from ratel_cli.hardware.host import available_bytes, memory_bytes, processor_name
from ratel_cli.units import GIB
from scripts.bench.ceilings import Sustained, sustained
from scripts.bench.findings import Report
from scripts.bench.gpu_layer import deterministic, seconds_of, setting, shapes_of
from scripts.bench.one_layer import LayerCase, one_layer
from tests.simulated_gpu import install_if_asked, is_simulated

ROOT = Path(__file__).parents[2]
_PACKAGES = (
    "torch", "transformers", "peft", "triton", "bitsandbytes", "liger-kernel", "trl", "datasets", "numpy",
)  # fmt: skip
_SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu",
    "pcie.link.gen.current", "pcie.link.width.current",
)  # fmt: skip
_TESTS = (
    "tests/gpu/test_quantised.py", "tests/gpu/test_adapters.py", "tests/gpu/test_frozen_parts.py",
    "tests/gpu/test_preferences.py", "tests/gpu/test_streamed.py", "tests/gpu/test_latents.py",
    "tests/gpu/test_device.py", "tests/gpu/test_link.py", "tests/gpu/test_memory.py",
    "tests/gpu/test_exactness.py", "tests/gpu/test_hook.py", "tests/gpu/test_runs.py",
)  # fmt: skip
"""What has never run on a GPU comes first."""
_TINY_TESTS = ("tests/gpu/test_quantised.py", "-k", "int4")
_COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|rerun)")
_PROGRESS = re.compile(r"[.FEsxXR]+\s*(\[ *\d+%\])?\s*")
_MOST_OUTPUT = 200_000


def device_of_part() -> torch.device:
    """The GPU, ready for use; the simulated one where that is asked for."""
    install_if_asked()
    return compute_device("auto")


# --- The machine -----------------------------------------------------------------------------------------------------


def find_machine(report: Report) -> None:
    """What it is, and the rates that a plan counts on."""
    versions = report.measure("versions", _versions) or {}
    device = report.measure("device", device_of_part)
    smi = report.measure("nvidia-smi", _asked_smi) if shutil.which("nvidia-smi") else None
    host = report.measure("host", _host) or {}
    if device is None:
        return
    seconds = 0.01 if report.is_tiny else 1.0
    measured = report.measure("GPU", lambda: measure_device(torch.bfloat16, device, seconds))
    link = None if device.type == "cpu" else report.measure("link", lambda: measure_link(device, seconds))
    report.measure("allocator", _allocator)
    driver = f", driver {smi['driver_version']}" if smi else ""
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    report.line(f"{measured.name if measured else device}{driver}; Python {platform.python_version()}, {packages}")
    spaces = ", ".join(f"{path} {free / GIB:.0f} GiB" for path, free in _free_space().items())
    report.line(f"{host.get('processor')}, {host.get('cores')} cores, {memory_bytes() / GIB:.0f} GiB; free: {spaces}")
    if measured is not None and link is not None:
        rate = measured.memory_bytes_per_second or 0.0
        report.line(
            f"products {measured.flops_per_second / 1e12:.3g} TFLOP/s, additions {rate / 1e12:.3g} TB/s; link "
            f"{link.to_gpu_bytes_per_second / 1e9:.1f} GB/s up, {link.from_gpu_bytes_per_second / 1e9:.1f} down, "
            f"{link.both_bytes_per_second / 1e9:.1f} both"
        )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {**found, "CUDA": torch.version.cuda}


def _asked_smi() -> dict[str, str]:
    """Of the first GPU, by the names of nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    finished = subprocess.run(command, check=True, capture_output=True, text=True, timeout=15)
    values = finished.stdout.splitlines()[0].split(", ")
    return dict(zip(_SMI_FIELDS, values, strict=False))


def _host() -> dict[str, object]:
    return {
        "processor": processor_name(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "available_bytes": available_bytes(),
        "instruction sets": _native.supported_isas(),
        "free_bytes": _free_space(),
    }


def _free_space() -> dict[str, int]:
    return {path: shutil.disk_usage(path).free for path in ("/dev/shm", "/tmp") if Path(path).is_dir()}


def _allocator() -> object:
    snapshot = torch.cuda.memory._snapshot() if torch.cuda.is_available() else {}
    return snapshot.get("allocator_settings") if isinstance(snapshot, dict) else None


# --- Tests -----------------------------------------------------------------------------------------------------------


def run_tests(report: Report) -> None:
    """Tests of the GPU path on this GPU, on as many processes as there are cores, as far as the time reaches."""
    cores = len(os.sched_getaffinity(0))
    workers = 0 if report.is_tiny else max(1, min(14, cores - 2))
    chosen = _TINY_TESTS if report.is_tiny else _TESTS
    command = [
        sys.executable, "-m", "pytest", *chosen, "-n", str(workers), "-q", "-rfE", "--tb=short", "-W", "default",
        "-p", "no:cacheprovider", "--maxfail=30",
    ]  # fmt: skip
    found = report.measure("tests", lambda: _tests(report, command))
    if found is not None:
        counted = ", ".join(f"{number} {what}" for what, number in found.counts.items()) or "none counted"
        ended = f"exit code {found.code}" if found.code is not None else "ended by the time box"
        report.line(f"{counted}; {ended}" + "".join(f"; {each}" for each in found.failed[:2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """How a run of tests ended."""

    code: int | None
    """None: it was ended."""
    counts: dict[str, int]
    failed: list[str]


def _tests(report: Report, command: Sequence[str]) -> Tested:
    """Its output is kept, also if it is ended. It goes to a file: workers that outlive it would hold a pipe open."""
    code: int | None = None
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(report.seconds_left)
        if code is None:
            process.kill()  # its workers end with the part, at the latest
            process.wait()
        output.seek(0)
        lines = output.readlines()
    report.table("output of the tests", "".join(lines)[-_MOST_OUTPUT:])
    last = lines[-1] if lines else ""
    counts = {what: int(number) for number, what in _COUNTED.findall(last)}
    if code is None:
        progress = [line for line in lines if _PROGRESS.fullmatch(line)]
        counts = {"passed": sum(line.count(".") for line in progress)}
        counts["failed"] = sum(line.count("F") for line in progress)
    failed = [line.strip() for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Tested(code=code, counts=counts, failed=failed)


# --- The yardstick ---------------------------------------------------------------------------------------------------


def measure_yardstick(report: Report) -> None:
    """A large product and a layer's step, each for ten seconds: the best, the median, and the clock meanwhile."""
    device = device_of_part()
    size = setting(report, 8192, 64)
    product = report.measure("product", lambda: _sustained_product(size, device, seconds_of(report, 10)))
    if product is not None:
        report.line(_words(f"{size}^3 product", product))
    for shape in shapes_of(report):
        found = report.measure(f"layer of {shape}", partial(_sustained_layer, report, shape, device))
        if found is not None:
            report.line(_words(f"layer of {shape}", found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What the GPU does of one kind of work."""

    times: Sustained
    flops_per_second: dict[str, float]
    clocks: dict[str, float]
    """Of nvidia-smi meanwhile: medians; nothing where it is not there."""


def _words(name: str, found: Yardstick) -> str:
    rates = ", ".join(f"{rate / 1e12:.3g} {which}" for which, rate in found.flops_per_second.items())
    read = "".join(f", {value:.0f} {unit}" for unit, value in found.clocks.items())
    return f"{name}: TFLOP/s {rates}{read}"


def _sustained_product(size: int, device: torch.device, seconds: float) -> Yardstick:
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    with clocks() as watched:
        found = sustained(lambda: torch.matmul(left, right), device, seconds=seconds)
    return Yardstick(times=found, flops_per_second=found.rates(2 * size**3), clocks=watched.medians())


def _sustained_layer(report: Report, shape: str, device: torch.device) -> Yardstick:
    case = LayerCase(shape=shape, rows=4, row_tokens=setting(report, 4096, 8))
    with deterministic(device), one_layer(case, device) as layer, clocks() as watched:
        found = sustained(layer.step, device, seconds=seconds_of(report, 10))
        return Yardstick(times=found, flops_per_second=found.rates(3 * layer.flops), clocks=watched.medians())


@dataclass(slots=True)
class Clocks:
    """What nvidia-smi says again and again."""

    lines: list[str] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """MHz, W, and degrees Celsius."""
        rows = []
        for line in self.lines:
            with contextlib.suppress(ValueError):
                rows.append([float(value) for value in line.split(",")])
        whole = [row for row in rows if len(row) == len(_WATCHED)]
        return {name: median(row[place] for row in whole) for place, name in enumerate(_WATCHED)} if whole else {}


_WATCHED = ("SM MHz", "W", "C")


@contextmanager
def clocks() -> Iterator[Clocks]:
    """A context in which nvidia-smi is asked every half second, where it is there."""
    watched = Clocks()
    if shutil.which("nvidia-smi") is None or is_simulated():
        yield watched
        return
    asked = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    command = ["nvidia-smi", asked, "--format=csv,noheader,nounits", "-lms", "500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=watched.lines.extend, args=(process.stdout,), name="clocks")
        reader.start()
        try:
            yield watched
        finally:
            process.terminate()
            reader.join(timeout=5)
