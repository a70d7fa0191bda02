"""Completion in the shell: commands, options and keys of the config; a name is completed without importing torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.config.others.aliases import SECTIONS
from tests.test_layers import HEAVY

PROBE = f"""
import sys
from ratel_cli.cli.app import main
try:
    main([])
finally:
    print(sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)
"""


def completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """What bash would offer behind these words, the last of which is incomplete."""
    monkeypatch.setenv("_RATEL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(("ratel", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("fi",), ["finetune"]),
        (("ch",), ["check"]),
        (("finetune", "run.yaml", "--dry"), ["--dry-run"]),
        (("init", "--ov"), ["--overwrite"]),
        (("explain", "learning_r"), ["learning_rate"]),
        (("explain", "storage.sn"), ["storage.snapshot", "storage.snapshot.path", "storage.snapshot.every"]),
        (("explain", "nothing_like_it"), []),
    ],
)
def test_what_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], offered: list[str]
) -> None:
    assert completed(monkeypatch, capsys, *words) == offered


def test_every_key_is_offered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(completed(monkeypatch, capsys, "explain", "")) == sum(
        len(each.model_fields) for each in SECTIONS.values()
    )


def test_nothing_heavy_is_imported() -> None:
    environment = {"_RATEL_COMPLETE": "complete_bash", "COMP_WORDS": "ratel explain se", "COMP_CWORD": "2"}
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.stdout.split(), result.stderr.strip()) == (["sequence_len", "seed"], "[]")


def test_the_script_for_a_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    with pytest.raises(SystemExit) as ended:
        main(["--show-completion"])
    assert ended.value.code == 0
    assert "complete -o default -F _ratel_completion ratel" in capsys.readouterr().out
