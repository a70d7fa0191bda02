"""`ratel doctor` and `ratel env`: what they print and leave, their exit codes, and what they keep to themselves."""

from __future__ import annotations

import getpass
import io
import json
import os
import platform
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.console import RunLog
from ratel_cli.errors import BadInput
from ratel_cli.hardware.checkup import Diagnosis
from ratel_cli.hardware.checkup_gpu import GpuSight
from ratel_cli.hardware.environment import describe_environment
from ratel_cli.report.words.doctor import diagnoses_to_json, diagnosis_lines
from ratel_cli.report.words.environment import environment_rows
from ratel_cli.run.ask.doctor import examine
from ratel_cli.run.files.places import find_places
from ratel_cli.units import GIB
from tests.hardware.machines import Machine

NO_GPU = GpuSight(build=None, failure=None, name=None)
SHAPE = "model_shape: {num_layers: 2, num_heads: 2, hidden_size: 64, vocab_size: 100}\n"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path / "root")
    machine.drive("nvme0n1", "259:0", model="Fast SSD")
    return machine.mount("259:0", "/", "ext4", "/dev/nvme0n1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


def found(machine: Machine, *arguments: object) -> list[Diagnosis]:
    log = RunLog(io.StringIO())
    places = find_places([Path(str(argument)) for argument in arguments], log)
    return examine(places, log, files=machine.files, look=lambda: NO_GPU)


def named(diagnoses: list[Diagnosis], what: str) -> Diagnosis:
    [diagnosis] = [diagnosis for diagnosis in diagnoses if diagnosis.what == what]
    return diagnosis


def test_arguments_change_the_config(here: Path) -> None:
    Path("run.yaml").write_text("base_model: /none\ndatasets: d.jsonl\n")
    places = find_places([Path("run.yaml"), Path("output_dir=other/out"), Path("device=cpu")], RunLog(io.StringIO()))
    assert places.paths == (Path("other/out.store"),)
    assert [config.device for config in places.configs] == ["cpu"]
    with pytest.raises(BadInput, match="argument 'device=cpu': there is no run that it could change"):
        find_places([Path("device=cpu")], RunLog(io.StringIO()))
    Path("device=cpu").mkdir()
    assert find_places([Path("device=cpu")], RunLog(io.StringIO())).paths == (Path("device=cpu"),)


def test_everything_is_examined_and_nothing_remains(machine: Machine, here: Path) -> None:
    diagnoses = found(machine)
    assert [each.what for each in diagnoses] == [
        "memory", "huge pages", "threads", "packages", "io_uring", ".", "GPU",
    ]  # fmt: skip
    assert named(diagnoses, ".").reason.startswith("ext4 on nvme0n1 (Fast SSD), ")
    assert not {each.verdict for each in diagnoses} - {"ok", "slow"}
    assert list(here.iterdir()) == []


def test_a_config_brings_its_directories_and_its_needs(machine: Machine, here: Path) -> None:
    """Also directories that do not exist yet, which stay so; and both of one drive."""
    (here / "run.yaml").write_text(f"{SHAPE}storage: {{paths: [a, b]}}\nlimits: {{host_memory: 65GiB}}\ndevice: cpu\n")
    diagnoses = found(machine, "run.yaml", here)
    assert named(diagnoses, "memory").verdict == "broken"
    assert "limits.host_memory is 65.0 GiB" in named(diagnoses, "memory").reason
    assert named(diagnoses, "GPU").reason == "not used: device is cpu"
    assert named(diagnoses, "bf16").remedy == "set dtype: float32"
    assert all(each.what != "bf16" for each in found(machine, "run.yaml", "dtype=float32"))
    assert named(diagnoses, "space").verdict == "ok"
    first, second = (
        each.what for each in diagnoses if each.what.startswith(("a/run-", "b/run-")) and each.verdict == "ok"
    )
    assert Path(first).name == Path(second).name
    shared = [each for each in diagnoses if "on the same drive as" in each.reason]
    assert [each.what for each in shared] == [second, str(here), str(here)]
    assert sorted(path.name for path in here.iterdir()) == ["run.yaml"]


@pytest.mark.full
def test_a_store_that_does_not_fit(machine: Machine, here: Path) -> None:
    shape = "model_shape: {num_layers: 9000, num_heads: 64, hidden_size: 65536}\n"
    (here / "run.yaml").write_text(shape)
    space = named(found(machine, "run.yaml"), "space")
    assert space.verdict == "broken" and "short by" in space.reason


def test_a_model_that_is_not_here(machine: Machine, here: Path) -> None:
    """Its store's size is not known, and nothing is downloaded."""
    (here / "run.yaml").write_text("base_model: org/name\ndatasets: d.jsonl\n")
    assert "space" not in [each.what for each in found(machine, "run.yaml")]


def test_lines_and_json() -> None:
    diagnoses = [
        Diagnosis(what="swap", verdict="ok", reason="none"),
        Diagnosis(what="huge pages", verdict="slow", reason="turned off", remedy="turn on"),
    ]
    assert diagnosis_lines(diagnoses) == [
        "ok      swap        none",
        "slow    huge pages  turned off",
        "                    > turn on",
    ]
    assert diagnosis_lines([]) == []
    assert diagnoses_to_json(diagnoses) == {
        "broken": 0,
        "checks": [
            {"what": "swap", "verdict": "ok", "reason": "none", "remedy": None},
            {"what": "huge pages", "verdict": "slow", "reason": "turned off", "remedy": "turn on"},
        ],
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_broken_ends_with_exit_code_3_after_all_was_told(
    here: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    assert main(["doctor", "/proc", *(["--json"] if as_json else [])]) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith("error: /proc: a file cannot be created in it: ")
    assert "hint: give yourself the right to write there" in captured.err
    if as_json:
        checks = json.loads(captured.out)["checks"]
        assert [each["verdict"] for each in checks if each["what"] == "/proc"] == ["broken"]
    else:
        assert "\nbroken  /proc" in captured.out and "GPU" in captured.out


@pytest.mark.parametrize("command", ["doctor", "env"])
def test_wrong_arguments(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (here / "run.yaml").write_text("base_modle: x\n")
    for argument, message in (("none", "none: no such file"), ("run.yaml", "unknown key `base_modle`")):
        assert main([command, argument]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == ""


def test_the_environment_of_a_machine(machine: Machine, here: Path) -> None:
    machine.write("etc/os-release", 'NAME=x\nPRETTY_NAME="Debian GNU/Linux 12"\n').gpu()
    machine.write("proc/self/cgroup", "0::/\n").write("sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    machine.write("sys/fs/cgroup/memory.current", "0\n").write("sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    environment = describe_environment([here, here / "none"], {"torch": "2.13.0", "rich": "15.0"}, machine.files)
    rows = dict(environment_rows(environment))
    assert rows["torch"].startswith("2.13.0 (") and rows["rich"] == "15.0"
    assert rows["system"].startswith("Debian GNU/Linux 12, kernel ")
    assert rows["CPU"].startswith("Fast CPU, ") and ": avx2, fma, avx512f; kernels use " in rows["CPU"]
    assert rows["memory"] == "64.0 GiB, 8.00 GiB of it available, 8.00 GiB by the limit of the control group"
    assert rows["GPU"] == "1 x NVIDIA RTX"
    assert "570.86.10" in rows["driver"]
    assert rows["storage 1"].startswith("ext4 on nvme0n1 (Fast SSD), ") and rows["storage 2"] == rows["storage 1"]


def test_a_machine_that_says_next_to_nothing(machine: Machine, here: Path) -> None:
    machine.write("proc/self/mountinfo", "").write("proc/cpuinfo", "")
    rows = dict(environment_rows(describe_environment([here], {}, machine.files)))
    assert rows["GPU"] == "none visible" and "no instruction sets known" in rows["CPU"]
    assert rows["storage 1"].startswith("unknown, ") and "driver" not in rows


def test_nothing_private_is_told(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    secret = here / "of-alice"
    secret.mkdir()
    for arguments in (["env", str(secret)], ["env", "--json", str(secret)]):
        assert main(arguments) == 0
        told = capsys.readouterr().out
        names = (getpass.getuser(), platform.node(), "hf_secret", "alice", str(tmp_path), os.path.expanduser("~"))
        assert [name for name in names if len(name) > 2 and name in told] == []
    assert json.loads(told)["storage"][0].keys() == {"file_system", "drives", "rotates", "is_read_only", "free_bytes"}
