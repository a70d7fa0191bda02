"""The README's promises that a machine can check: its commands exist, its configs load, its paths are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from ratel_cli.cli.app import main
from ratel_cli.config.load import load_config
from ratel_cli.errors import RatelError
from tests.engine.architectures import ARCHITECTURES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every command line in the README: those in blocks, and `make ...` in the text."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line]
    return [shlex.split(line) for line in (*lines, *re.findall(r"`(make [a-z]+)`", README))]


def called(program: str) -> list[list[str]]:
    """The arguments of each command that calls this program."""
    return [words[1:] for words in commands() if Path(words[0]).name == program]


def make_targets() -> dict[str, list[str]]:
    """Each target and its recipe's lines."""
    targets: dict[str, list[str]] = {}
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([^\t#:]+):(?!=)", line):
            recipe = targets.setdefault(match[1], [])
        elif line.startswith("\t") and targets:
            recipe.append(line.strip())
    return targets


def test_make_targets_exist_and_are_short() -> None:
    named = {target for arguments in called("make") for target in arguments}
    assert named == {"demo", "test", "stress", "lint", "types", "bench", "clean"}
    assert named <= make_targets().keys()
    assert all(len(recipe) <= 3 for recipe in make_targets().values())


@pytest.mark.parametrize("target", ["demo", "bench"])
def test_what_make_runs_exists(target: str) -> None:
    words = [word for line in make_targets()[target] for word in shlex.split(line)]
    modules = [word.replace(".", "/") + ".py" for word in words if word.startswith("scripts.")]
    paths = modules + [word for word in words if re.match(r"(scripts|configs)/", word)]
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_continuous_integration_runs_the_same() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    lines = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert lines == ["make lint", "make types", "make test"]


def test_commands_are_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is run as it stands, with a config that does not exist: it gets as far as missing it."""
    for arguments in called("ratel"):
        code = main([str(tmp_path / word) if word.endswith(".yaml") else word for word in arguments])
        told = capsys.readouterr().err
        assert (code, "there is no such file" in told) == (2, True), told
        assert main([*arguments, "--help"]) == 0
        capsys.readouterr()
    assert len(called("ratel")) >= 3


def test_the_test_of_commands_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "my-run.yaml", "--resume", "sometimes"]) == 2
    assert "there is no such file" not in capsys.readouterr().err


def test_configs_load_with_the_overrides_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "my-run.yaml"
    for text in blocks("yaml"):
        path.write_text(text, encoding="utf-8")
        assert load_config(path).notices == ()
        for arguments in called("ratel"):
            load_config(path, [word for word in arguments if "=" in word])
        path.write_text(f"{text}\nno_such_key: 1\n", encoding="utf-8")
        with pytest.raises(RatelError):
            load_config(path)
    assert len(blocks("yaml")) == 1


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    assert load_config(path).notices == ()
    assert yaml.safe_load(path.read_text())["base_model"].startswith("demo/")


def test_the_tree_is_there() -> None:
    [tree] = [block for block in blocks("text") if block.startswith("ratel_cli/\n")]
    named = []
    for line in tree.splitlines():
        name = line.split()[0]
        named.append(ROOT / "ratel_cli" / name if line.startswith(" ") else ROOT / name)
    assert [path for path in named if not path.exists()] == []
    parts = {path for path in (ROOT / "ratel_cli").iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert parts <= set(named)


def test_paths_in_the_text_are_there() -> None:
    paths = re.findall(r"`((?:ratel_cli|scripts|configs|kernels|tests)/[\w./-]+|\.constraints\.txt|\.ci/run)`", README)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_architecture_that_is_tested_is_named() -> None:
    named = README.replace("-", "_").lower()
    assert [name for name in ARCHITECTURES if name.removesuffix("_tied") not in named] == []


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = dict(re.findall(r"^\| ([\d, ]+) \| (.*) \|$", README, flags=re.MULTILINE))
    assert list(rows) == ["0", "1", "2", "3", "4", "5", "130, 143"]
