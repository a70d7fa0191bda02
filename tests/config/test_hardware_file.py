"""The messages for wrong hardware files: every error, each at its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ratel_cli.config.hardware_file import read_hardware_file
from ratel_cli.config.yaml.yaml_marks import MAX_TEXT_BYTES
from ratel_cli.errors import BadInput

Complain = Callable[[str], list[str]]
RATE = "must be a rate like 3.5GB/s or 3.5e9"
LINES = """\
gpu:
  name: a GPU
  memory_bytes: 24GiB
  flops_per_second: 1e14
link:
  to_gpu_bytes_per_second: 20GB/s
  from_gpu_bytes_per_second: 20GB/s
nvme:
  num_devices: 2
  read_bytes_per_second: 6GB/s
  write_bytes_per_second: 3GB/s
  free_bytes: 1TB
host:
  memory_bytes: 64GiB
  available_bytes: 60GiB
  adam_parameters_per_second: 1e9
"""


@pytest.fixture
def complain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Complain:
    """Reads a file that must be rejected. Gives every error, as `error | hint` if it has a hint."""
    monkeypatch.chdir(tmp_path)

    def read_wrong(text: str) -> list[str]:
        path = Path("hw.yaml")
        path.write_text(text)
        with pytest.raises(BadInput) as caught:
            read_hardware_file(path)
        found = (caught.value, *caught.value.others)
        return [each.message if each.hint is None else f"{each.message} | {each.hint}" for each in found]

    return read_wrong


def test_the_example_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "hw.yaml"
    path.write_text(LINES)
    assert read_hardware_file(path).nvme.free_bytes == 10**12


WRONG_LINES = [
    (2, "  name: ''", "2:9: `gpu.name` must not be empty"),
    (2, "  name: 4090", "2:9: `gpu.name` must be text, not 4090 | put it in quotes"),
    (3, "  memory_bytes: 24 GB/s", "3:17: `gpu.memory_bytes` must be a size like 24GiB, 500GB or 1e12"),
    (3, "  memory_bytes: 1.5", "3:17: `gpu.memory_bytes` must be a whole number, not 1.5"),
    (3, "  memory_bytes: -1", "3:17: `gpu.memory_bytes` must be at least 0, not -1"),
    (3, "  memory_bytes: true", "3:17: `gpu.memory_bytes` must be a whole number, not true"),
    (3, "  memory_bytes:", "3:3: `gpu.memory_bytes` has no value"),
    (4, "  flops_per_second: 0", "4:21: `gpu.flops_per_second` must be more than 0, not 0"),
    (4, "  flops_per_second: .inf", "4:21: `gpu.flops_per_second` must be a finite number, not inf"),
    (4, "  flops_per_second: fast", "4:21: `gpu.flops_per_second` must be a number, not 'fast'"),
    (5, "lnk:", "5:1: unknown key `lnk` | did you mean `link`?"),
    (9, "  num_devices: 0", "9:16: `nvme.num_devices` must be at least 1, not 0"),
    (9, "  num_device: 2", "9:3: unknown key `num_device` in `nvme` | did you mean `num_devices`?"),
    (9, "  zzz: 2", "9:3: unknown key `zzz` in `nvme`"),
    (9, "  # nothing", "10:3: `nvme` needs `num_devices`, or `paths`"),
    (9, "  weights: [1]", "9:3: `weights` has 1 entries, but `paths` has 0"),
    (9, "  paths: /a", "9:10: `nvme.paths` must be a list, not '/a' | write [/a]"),
    (9, "  paths: [/a, 7]", "9:15: `nvme.paths.1` must be text, not 7 | put it in quotes"),
    (10, "  read_bytes_per_second: 6GB", f"10:26: `nvme.read_bytes_per_second` {RATE}"),
    (10, "  read_bytes_per_second: 6GB/h", f"10:26: `nvme.read_bytes_per_second` {RATE}"),
    (10, f"  read_bytes_per_second: '1{'0' * 400}/s'", f"10:26: `nvme.read_bytes_per_second` {RATE}"),
    (10, "  read_bytes_per_second: 0/s", "10:26: `nvme.read_bytes_per_second` must be more than 0, not 0.0"),
    (15, "  available_bytes: 65GiB", "15:3: `available_bytes` is more than `memory_bytes`"),
    (16, "", "14:3: `host.adam_parameters_per_second` is missing"),
    (16, "format_version: 2", "16:17: `format_version` must be `1`, not 2"),
]
"""The number of a line, another line in its place, and the error with its place."""
WRONG_FILES = [
    ("", "hw.yaml:1:1: the file is empty"),
    ("- 1\n", "hw.yaml:1:1: a hardware file consists of `key: value` lines"),
    ("gpu: {\n", "hw.yaml:2:1: not valid YAML: the text ends too early"),
    ("#" * (MAX_TEXT_BYTES + 1), "hw.yaml: larger than 256 KiB; this is not a hardware file"),
    (LINES.replace("name: a GPU", "name: !!binary aGk="), "hw.yaml:2:9: the tag '!!binary' is not allowed here"),
]


def with_line(number: int, line: str) -> str:
    """The healthy file with another line."""
    lines = LINES.splitlines()
    lines[number - 1] = line
    return "\n".join(lines)


@pytest.mark.parametrize(("number", "line", "error"), WRONG_LINES)
def test_wrong_values(complain: Complain, number: int, line: str, error: str) -> None:
    assert f"hw.yaml:{error}" in complain(with_line(number, line))


@pytest.mark.parametrize(("text", "error"), WRONG_FILES)
def test_wrong_files(complain: Complain, text: str, error: str) -> None:
    [only] = complain(text)
    assert only.split(" | ")[0] == error


def test_the_rates_of_one_drive_alone(complain: Complain) -> None:
    """They are checked like all others, and there must be as many as paths."""
    alone = "  paths: [/a, /b]\n  alone:\n  - {read_bytes_per_second: 1, write_byte_per_second: 2}\n"
    assert complain(LINES.replace("  num_devices: 2\n", alone)) == [
        "hw.yaml:11:5: `nvme.alone.0.write_bytes_per_second` is missing",
        "hw.yaml:11:5: `nvme.alone.0.mixed_bytes_per_second` is missing",
        "hw.yaml:11:32: unknown key `write_byte_per_second` in `nvme.alone` | did you mean `write_bytes_per_second`?",
    ]
    complete = "{read_bytes_per_second: 1, write_bytes_per_second: 2, mixed_bytes_per_second: 1}"
    assert complain(LINES.replace("  num_devices: 2\n", f"  paths: [/a, /b]\n  alone: [{complete}]\n")) == [
        "hw.yaml:10:3: `alone` has 1 entries, but `paths` has 2"
    ]


def test_every_error_is_reported_at_once_in_the_order_of_the_file(complain: Complain) -> None:
    text = LINES.replace("24GiB", "much").replace("6GB/s", "no").replace("link:", "links:").replace("1e9", "-1")
    assert [each.split(": ")[0] for each in complain(text)] == [
        "hw.yaml:3:17",
        "hw.yaml:5:1",
        "hw.yaml:10:26",
        "hw.yaml:16:31",
    ]
    assert len(complain("a: 1\n")) == 4, "three sections are missing, and one is unknown"
