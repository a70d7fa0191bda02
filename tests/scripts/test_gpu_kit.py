"""The kit for a machine with a GPU: what goes wrong ends nothing else; wheels are complete and small; it all runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ratel_cli import _native
from scripts.bench.contestants import Task, batches_of
from scripts.bench.findings import Report, read_findings
from scripts.gpu_kit import set_up, wheels
from scripts.gpu_kit.__main__ import MOST_LINES
from scripts.gpu_kit.parts import ALL_SECONDS, PARTS
from tests.simulated_gpu import has_gpu

ROOT = Path(__file__).parents[2]
_RUN = """
import os, sys
from pathlib import Path
from scripts.gpu_kit.__main__ import Kit, end_on_sigterm
from scripts.gpu_kit.boxes import Part
if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    parts = [
        Part(name=name, seconds=0.1 if name == "hangs" else 500.0, function=f"tests.scripts.gpu_kit_parts:{name}")
        for name in names
    ]
    end_on_sigterm()
    os.environ["KIT_FOLDER"] = folder
    Kit(Path(folder), parts, seconds=580.0, is_tiny=True, preloaded=()).run()
"""


def run_fakes(folder: Path, *names: str) -> tuple[list[str], dict[str, dict[str, dict[str, object]]]]:
    """Lines and parts of a kit whose parts are those of `gpu_kit_parts`."""
    command = [sys.executable, "-c", _RUN, str(folder), *names]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    return output.splitlines(), json.loads((folder / "kit.json").read_text())["parts"]


def test_parts_that_go_wrong_end_no_other(tmp_path: Path) -> None:
    lines, parts = run_fakes(tmp_path, "crashes", "raises", "fails_in_one", "works")
    for name in ("crashes", "raises", "fails_in_one", "works"):
        assert parts[name]["results"]["a number"] == 7
    assert parts["crashes"]["failures"] == {"the part": "ended with exit code 9: the driver is gone"}
    assert parts["raises"]["failures"] == {"the part": "ended with exit code 1: OSError: no such GPU"}
    assert "ZeroDivisionError" in str(parts["fails_in_one"]["failures"]["a quotient"])
    assert any(line.startswith("works      all is well") for line in lines)
    assert any("a quotient failed (ZeroDivisionError" in line for line in lines)
    assert (tmp_path / "lines.txt").read_text().splitlines() == lines


@pytest.mark.full
def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    _, parts = run_fakes(tmp_path, "hangs", "works")
    assert parts["hangs"]["failures"] == {"the part": "ended at its time limit"}
    assert parts["works"]["results"]["a number"] == 7
    child = parts["hangs"]["results"].get("child")
    if child is not None:  # None: on a busy machine it was ended before
        wait_for(lambda: is_gone(int(str(child))))


@pytest.mark.full
def test_a_kit_that_is_ended_ends_the_part_that_runs(tmp_path: Path) -> None:
    """Its processes leave no part behind that goes on computing."""
    command = [sys.executable, "-c", _RUN.replace('"hangs"', '"never"'), str(tmp_path), "hangs"]
    with subprocess.Popen(command, cwd=ROOT) as kit:
        wait_for((tmp_path / "started").exists)
        kit.terminate()
        assert kit.wait() != 0
    child = int((tmp_path / "started").read_text())
    wait_for(lambda: is_gone(child))


def is_gone(process: int) -> bool:
    state = Path(f"/proc/{process}/stat")
    return not state.exists() or ") Z " in state.read_text()


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():  # the test's own time limit ends it
        time.sleep(0.02)


def test_at_most_forty_lines(tmp_path: Path) -> None:
    lines, parts = run_fakes(tmp_path, "talks")
    assert len(parts["talks"]["lines"]) == 20 and len(lines) == 5
    assert 4 * len(PARTS) + 1 >= MOST_LINES == 40
    assert ALL_SECONDS < 600


def test_a_report_keeps_what_came_before(tmp_path: Path) -> None:
    report = Report(tmp_path / "part.json", seconds=60.0)
    assert report.measure("first", lambda: {"rate": 2.0}) == {"rate": 2.0}
    assert report.measure("second", lambda: {}["rate"]) is None
    assert report.measure("third", lambda: 3, needs_seconds=61.0) is None
    found = read_findings(tmp_path / "part.json")
    assert found.results == {"first": {"rate": 2.0}}
    assert found.failures == {"second": "KeyError: 'rate'"}
    assert found.left_out == {"third": "no time left"}
    assert read_findings(tmp_path / "other.json").results == {}


def test_a_command_that_exits_is_a_failure_of_one_measurement() -> None:
    report = Report()
    assert report.measure("plain", lambda: sys.exit("plain failed with exit code 1")) is None
    assert report.findings.failures == {"plain": "SystemExit: plain failed with exit code 1"}


def test_the_kit_rejects_parts_that_it_has_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.gpu_kit", str(tmp_path), "--parts", "kernel"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert refused.returncode == 2 and "invalid choice: 'kernel'" in refused.stderr


@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_of_packed_rows_are_those_of_whole_ones(rows: int) -> None:
    """Samples begin at position 0; the last token of one has no target, and all inputs stay."""
    task = Task(contestant="ratel", shape="tiny", tokens=rows * 12, rows=rows, micro_batches=1, steps=1)
    [[whole]], [[packed]] = batches_of(task), batches_of(replace(task, samples=3))
    assert torch.equal(whole.input_ids, packed.input_ids)
    assert packed.position_ids[0].tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    is_last = torch.zeros(rows, 12, dtype=torch.bool)
    is_last[:, :-1] = packed.position_ids[:, 1:] == 0
    assert torch.equal(packed.targets, whole.targets.masked_fill(is_last, -100))
    assert (whole.num_targets, packed.num_targets) == (rows * 12, rows * 10)


# --- What travels ----------------------------------------------------------------------------------------------------


def make_wheel(path: Path, files: dict[str, str], *, requires: tuple[str, ...] = ()) -> Path:
    name, version, *_ = path.name.split("-")
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
    whole = {**files, f"{info}/METADATA": metadata, f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n"}
    whole[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in (*whole, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in whole.items():
            archive.writestr(each, text)
    return path


def test_bitsandbytes_is_packed_with_one_library(tmp_path: Path) -> None:
    libraries = [f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cuda118", "cuda130", "rocm70", "cpu")]
    files = {"bitsandbytes/__init__.py": "", **dict.fromkeys(libraries, "code")}
    wheel = make_wheel(tmp_path / "bitsandbytes-0.50.2-py3-none-any.whl", files)
    target = tmp_path / "packed" / wheel.name
    target.parent.mkdir()
    wheels.repack(wheel, target, cuda="130")
    with zipfile.ZipFile(target) as archive:
        names = set(archive.namelist())
        record = archive.read("bitsandbytes-0.50.2.dist-info/RECORD").decode()
    assert names == {line.split(",")[0] for line in record.splitlines()}
    assert names & set(libraries) == {libraries[1], libraries[3]}
    with pytest.raises(SystemExit, match=r"no library for CUDA 126; it has .*cuda118.*cuda130"):
        wheels.repack(wheel, target, cuda="126")


def test_what_wheels_need_and_the_machine_lacks(tmp_path: Path) -> None:
    requires = (
        "torch>=2", "Typing_Inspection>=0.4", "core==2.50.4", "b>=1; extra == 'all'", "c; python_version < '3.12'",
        "d; sys_platform == 'win32'", "e",
    )  # fmt: skip
    make_wheel(tmp_path / "a-1.0-py3-none-any.whl", {"a.py": ""}, requires=requires)
    make_wheel(tmp_path / "e-1.0-py3-none-any.whl", {"e.py": ""})
    assert wheels.missing(tmp_path, {"torch"}) == {"typing-inspection", "core==2.50.4"}
    assert set(wheels._names_in("torch==2.11.0\nTyping_Inspection @ file:///x\n\n")) == {"torch", "typing-inspection"}


def test_a_folder_that_is_too_large_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a-1.0-py3-none-any.whl"
    file.write_bytes(b"")
    assert wheels.report(tmp_path) == 0
    os.truncate(file, wheels.MOST_BYTES + 1)
    assert wheels.report(tmp_path) == 1
    assert "64.00 MiB  in 1 files; at most 64 MiB" in capsys.readouterr().out


def test_versions_are_those_of_the_tests() -> None:
    assert wheels._pinned("transformers").startswith("transformers==5.")
    assert wheels._pinned("liger-kernel") == "liger-kernel"


def test_set_up_installs_beside_what_is_there(tmp_path: Path) -> None:
    folder, site, purelib = tmp_path / "wheels", tmp_path / "site", tmp_path / "purelib"
    for each in (folder, purelib):
        each.mkdir()
    make_wheel(folder / "carried_along-1.0-py3-none-any.whl", {"carried_along.py": "NUMBER = 7\n"})
    set_up.install(folder, site)
    set_up.describe_program(site)
    path = set_up.write_pth(purelib, site)
    shown = f"import site; site.addsitedir({str(purelib)!r}); import carried_along, importlib.metadata as m, sys;"
    shown += "print(carried_along.NUMBER, m.version('ratel-cli'), sys.path[:2])"
    output = subprocess.run([sys.executable, "-I", "-c", shown], check=True, capture_output=True, text=True).stdout
    assert output.split()[0] == "7" and str([str(site), str(ROOT)]) in output
    assert path.name == set_up.PTH


def test_set_up_leaves_a_program_of_others_alone(tmp_path: Path) -> None:
    assert set_up.write_program(tmp_path) == str(tmp_path / "ratel")
    assert set_up.write_program(tmp_path) == str(tmp_path / "ratel")  # its own, again
    shown = subprocess.run([tmp_path / "ratel", "--version"], check=True, capture_output=True, text=True, cwd=ROOT)
    assert shown.stdout.strip()
    (tmp_path / "ratel").write_text("#!/bin/sh\n")
    assert "was there, and stays" in set_up.write_program(tmp_path)
    assert (tmp_path / "ratel").read_text() == "#!/bin/sh\n"


def test_set_up_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no wheels"):
        set_up.install(tmp_path, tmp_path / "site")
    (tmp_path / "broken-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(SystemExit, match="pip could not install the wheels"):
        set_up.install(tmp_path, tmp_path / "site")


def test_set_up_takes_the_kernels_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First those beside the package, then those of the folder, which are copied there."""
    (tmp_path / "ratel_cli").mkdir()
    (tmp_path / "wheels").mkdir()
    shutil.copy(_native.__file__, tmp_path / "wheels")
    monkeypatch.setattr(set_up, "ROOT", tmp_path)
    assert set_up.put_kernels(tmp_path / "wheels").endswith(f"of {tmp_path / 'wheels'}")
    assert set_up.put_kernels(tmp_path / "nowhere").endswith("was there")


# --- All of it -------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.skipif(has_gpu(), reason="there is a GPU: the kit itself runs on it")
def test_a_part_runs_on_the_simulated_gpu(tmp_path: Path) -> None:
    lines, parts = run_kit(tmp_path, "machine", "yardstick")
    assert lines[0].startswith("machine    simulated GPU; Python")
    assert not any(found["failures"] or found["left_out"] for found in parts.values())
    assert set(parts["yardstick"]["results"]) == {"product", "layer of tiny-qwen3", "layer of tiny"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.skipif(has_gpu(), reason="there is a GPU: the kit itself runs on it")
def test_the_whole_kit_runs_on_the_simulated_gpu(tmp_path: Path) -> None:
    lines, parts = run_kit(tmp_path, *(part.name for part in PARTS))
    assert len(lines) <= MOST_LINES
    assert set(parts) == {part.name for part in PARTS}
    assert {"NF4", "int8", "int4", "MXFP4"} <= set(parts["quantised"]["results"])
    assert not any(found["failures"] for found in parts.values())
    left_out = {name for found in parts.values() for name in found["left_out"]}
    assert all(name.startswith(("by lengths", "cuDNN", "compiled", "Liger")) for name in left_out)
    assert "operators on the CPU" in (tmp_path / "tables.txt").read_text()


def run_kit(
    folder: Path, *names: str, seconds: float = 20_000.0
) -> tuple[list[str], dict[str, dict[str, dict[str, object]]]]:
    command = [sys.executable, "-m", "scripts.gpu_kit", str(folder), "--seconds", str(seconds), "--parts", *names]
    environment = {**os.environ, "RATEL_SIMULATED_GPU": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment).stdout
    return output.splitlines(), json.loads((folder / "kit.json").read_text())["parts"]
