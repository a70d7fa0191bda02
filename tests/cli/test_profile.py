"""`ratel profile`: what it measures, what it caches, and its errors."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli.cli.app import main
from ratel_cli.console import RunLog
from ratel_cli.errors import EnvironmentFailure
from ratel_cli.hardware.budget import MeasurementBudget
from ratel_cli.hardware.host import available_bytes, free_bytes
from ratel_cli.hardware.spec import HardwareProfile
from ratel_cli.run.files.hardware_file import load_hardware, to_text
from ratel_cli.run.files.profile_cache import ProfileTarget, cache_file, machine_profile, with_recent_rates
from ratel_cli.run.train.profile_machine import measure_machine
from ratel_cli.units import MIB
from tests.hardware.profiles import WITHOUT_GPU

SMALL = MeasurementBudget(
    seconds=0.02, span_bytes=4 * MIB, buffer_bytes=2 * MIB, memory_bytes=2 * MIB, adamw_bytes=4 * MIB
)


@pytest.fixture
def cache() -> Path:
    """The test's own cache directory, which does not exist yet."""
    return Path(os.environ["XDG_CACHE_HOME"]) / "ratel"


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileTarget:
    """The default target, in a working directory of its own."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return ProfileTarget(paths=(here,), dtype="bfloat16", device="auto", engine="auto")


@pytest.fixture
def cached(target: ProfileTarget) -> Path:
    """The file of a cached profile of the default target, so that nothing is measured."""
    file = cache_file(target)
    file.parent.mkdir(parents=True)
    file.write_text(to_text(WITHOUT_GPU))
    return file


AGAIN = "`ratel profile --refresh`"


class Measuring:
    """Gives the same profile each time, and counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, target: ProfileTarget) -> HardwareProfile:
        self.count += 1
        return replace(WITHOUT_GPU, nvme=replace(WITHOUT_GPU.nvme, paths=tuple(map(str, target.paths))))


def printed(
    target: ProfileTarget, measure: Callable[[ProfileTarget], HardwareProfile], *, refresh: bool = False
) -> str:
    """What `machine_profile` prints."""
    stream = io.StringIO()
    machine_profile(target, measure, RunLog(stream), refresh=refresh, refreshed_by=AGAIN)
    return stream.getvalue()


def test_a_machine_is_measured_once_and_then_cached(target: ProfileTarget) -> None:
    measure = Measuring()
    assert printed(target, measure) == ""
    assert list(cache_file(target).parent.iterdir()) == [cache_file(target)], "no unfinished file stays"
    two_hours_ago = time.time() - 2 * 3600 - 5 * 60
    os.utime(cache_file(target), (two_hours_ago, two_hours_ago))
    assert printed(target, measure) == f"machine measured 2 h 05 min ago; {AGAIN} measures again\n"
    assert measure.count == 1
    assert printed(target, measure, refresh=True) == ""
    assert measure.count == 2
    assert time.time() - cache_file(target).stat().st_mtime < 60


def test_rates_are_cached_and_free_space_is_not(target: ProfileTarget, cached: Path) -> None:
    profile = machine_profile(target, Measuring(), RunLog(io.StringIO()), refresh=False, refreshed_by=AGAIN)
    assert profile.gpu == WITHOUT_GPU.gpu
    assert profile.nvme.read_bytes_per_second == WITHOUT_GPU.nvme.read_bytes_per_second
    assert profile.nvme.paths == tuple(map(str, target.paths))
    assert profile.nvme.free_bytes == pytest.approx(free_bytes(target.paths), rel=0.2)
    assert profile.host.available_bytes == pytest.approx(available_bytes(), rel=0.5)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "float32"},
        {"device": "cpu"},
        {"engine": "threads"},
        {"paths": (Path("/proc"),)},
        {"paths": (Path("/"), Path("/proc"))},
    ],
    ids=str,
)
def test_another_target_has_another_profile(target: ProfileTarget, other: dict[str, object]) -> None:
    assert cache_file(replace(target, **other)) != cache_file(target)  # type: ignore[arg-type]


def test_directories_on_one_drive_share_a_profile(target: ProfileTarget, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert cache_file(replace(target, paths=(tmp_path / "there",))) == cache_file(target)


def test_the_cache_is_in_the_home_directory_by_default(target: ProfileTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_file(target).parent == Path("/home/me/.cache/ratel")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format_version": 2}', "\x00"])
def test_a_corrupt_cache_is_measured_again(target: ProfileTarget, cached: Path, content: str) -> None:
    cached.write_text(content)
    measure = Measuring()
    assert printed(target, measure).startswith(f"note: the cached profile of this machine cannot be used: {cached}")
    assert measure.count == 1
    assert load_hardware(cached).gpu == WITHOUT_GPU.gpu


def test_a_cache_that_cannot_be_written(target: ProfileTarget, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the directory should be")
    measure = Measuring()
    assert "the profile cannot be cached (" in printed(target, measure)
    assert measure.count == 1


def test_the_table_goes_to_stdout(cached: Path, target: ProfileTarget, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("compute  a CPU: 500 GFLOP/s in bfloat16\nmemory   4.00 TiB, ")
    assert str(target.paths[0]) in captured.out.splitlines()[-1]
    assert captured.err.startswith("machine measured ")


def test_json_is_the_hardware_file(cached: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "hardware.json"
    assert main(["profile", "--json", "-o", str(file)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["gpu"]["name"] == "a CPU"
    assert captured.out == file.read_text()
    assert captured.err.splitlines()[-1] == f"wrote {file}"
    assert load_hardware(file).gpu == WITHOUT_GPU.gpu


def test_a_config_decides_what_is_measured(
    target: ProfileTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its store does not exist yet: it is measured where it will be."""
    mine = replace(target, dtype="float32", device="cpu", engine="threads", paths=(tmp_path,))
    cache_file(mine).parent.mkdir(parents=True)
    cache_file(mine).write_text(to_text(WITHOUT_GPU))
    config = tmp_path / "run.yaml"
    config.write_text(
        "model_shape: {num_layers: 2, num_heads: 2, hidden_size: 8, vocab_size: 10}\nlr: 1e-4\n"
        "dtype: float32\ndevice: cpu\n"
        f"storage: {{paths: ['{tmp_path}/not/yet'], engine: threads}}\n"
    )
    assert main(["profile", str(config)]) == 0
    captured = capsys.readouterr()
    assert "GFLOP/s in float32" in captured.out
    assert f" {tmp_path}, 1 drive" in captured.out
    assert "`lr` is read as `learning_rate`" in captured.err
    assert main(["profile", str(config), "--storage", str(target.paths[0])]) == 0
    assert f" {target.paths[0]}, 1 drive" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["none.yaml"], 2, "error: none.yaml: no such file"),
        (["--storage", "none", "--storage", "nil"], 2, "error: argument '--storage none': there is no such directory"),
        (["--storage", "none", "--storage", "nil"], 2, "error: argument '--storage nil': there is no such directory"),
        (["-o", "none/hardware.json"], 2, "error: argument '-o none/hardware.json': there is no directory none"),
        (["-o", "."], 2, "error: argument '-o .': this is a directory"),
        (["-o", "/proc/hardware.json"], 3, "error: /proc/hardware.json: cannot be written: "),
    ],
)
def test_wrong_arguments(
    cached: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(["profile", *arguments]) == code
    assert message in capsys.readouterr().err


def test_a_file_is_replaced_only_if_the_user_insists(
    cached: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one behind a link, and at once, not after measuring."""
    file, link, nowhere = tmp_path / "mine.json", tmp_path / "link.json", tmp_path / "nowhere.json"
    file.write_text("mine")
    link.symlink_to(file)
    nowhere.symlink_to(tmp_path / "none.json")
    for path in (file, link, nowhere):
        assert main(["profile", "--refresh", "-o", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: the file exists\n")
    assert file.read_text() == "mine" and not (tmp_path / "none.json").exists()
    assert main(["profile", "-o", str(file), "--overwrite"]) == 0
    assert load_hardware(file).gpu == WITHOUT_GPU.gpu


@pytest.mark.full
def test_measuring_reports_what_is_measured(target: ProfileTarget) -> None:
    log = io.StringIO()
    profile = measure_machine(replace(target, device="cpu"), RunLog(log), budget=SMALL)
    *measuring, done = log.getvalue().splitlines()
    assert measuring[-3:] == [
        f"measuring {target.paths[0]}",
        "measuring matrix products",
        "measuring RAM and AdamW",
    ]
    assert done.startswith("measured in ")
    assert profile.host.memory_bytes_per_second is not None


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_an_error(target: ProfileTarget) -> None:
    with pytest.raises(EnvironmentFailure, match="PyTorch finds no CUDA device"):
        measure_machine(replace(target, device="cuda"), RunLog(io.StringIO()), budget=SMALL)
    measured = measure_machine(target, RunLog(io.StringIO()), budget=SMALL)
    assert measured.link is None, "auto takes the CPU"


@pytest.mark.nightly
def test_the_whole_command(target: ProfileTarget, capsys: pytest.CaptureFixture[str]) -> None:
    """The second time, the profile is there at once. Nothing remains except the profile."""
    start = time.perf_counter()
    assert main(["profile"]) == 0
    assert time.perf_counter() - start < 300
    first = capsys.readouterr()
    assert "measuring matrix products" in first.err
    start = time.perf_counter()
    assert main(["profile"]) == 0
    assert time.perf_counter() - start < 10
    second = capsys.readouterr()
    assert second.err.startswith("machine measured ")
    assert second.out.splitlines()[0] == first.out.splitlines()[0]
    assert list(target.paths[0].iterdir()) == []


def test_brief_profiles_of_the_same_minutes_have_the_better_rates(target: ProfileTarget) -> None:
    """So commands that follow each other predict the same, whatever else the machine does meanwhile."""
    nvme = replace(WITHOUT_GPU.nvme, read_bytes_per_second=4e9, write_bytes_per_second=1e9)
    first = replace(WITHOUT_GPU, nvme=nvme)
    assert with_recent_rates(first, target) == first
    slow = replace(WITHOUT_GPU.gpu, flops_per_second=first.gpu.flops_per_second / 3)
    second = replace(first, gpu=slow, nvme=replace(nvme, write_bytes_per_second=2e9, free_bytes=5))
    both = with_recent_rates(second, target)
    assert both == replace(first, nvme=second.nvme), "the space is the one that is free now"
    assert with_recent_rates(first, target).nvme.write_bytes_per_second == 2e9
    file = cache_file(target, kind="brief")
    os.utime(file, (time.time() - 601, time.time() - 601))
    assert with_recent_rates(second, target) == second


@pytest.mark.parametrize("content", [b"nonsense", b"\xff", b"{}"])
def test_a_brief_profile_that_cannot_be_read_is_none(target: ProfileTarget, content: bytes) -> None:
    file = cache_file(target, kind="brief")
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert with_recent_rates(WITHOUT_GPU, target) == WITHOUT_GPU
