"""Commands in messages: they can be pasted into a shell, and name the run as the user did."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratel_cli.commands import (
    command,
    errors_about,
    forget_run,
    install_extras,
    name_run,
    pip_install,
    with_run_named,
)
from ratel_cli.errors import BadInput


@pytest.fixture(autouse=True)
def nothing_is_named() -> Iterator[None]:
    forget_run()
    yield
    forget_run()


@pytest.mark.parametrize("path", ["run.yaml", "outputs/run two é", "it's", "$HOME", "a;b"])
def test_a_shell_reads_back_what_was_quoted(path: str) -> None:
    shown = command("clean", Path(path), "--yes")
    assert shown[0] == shown[-1] == "`"
    assert shlex.split(shown[1:-1]) == ["ratel", "clean", path, "--yes"]


def test_messages_call_the_run_what_the_user_called_it() -> None:
    text = "`ratel data CONFIG --bad`; `ratel restore CONFIG`; `ratel profile CONFIG --refresh`; CONFIG"
    assert with_run_named(text) == text
    name_run(Path("my run.yaml"), ["seed=3", "datasets=a b"])
    name_run(Path("another.yaml"))  # such as the run of --from
    data, restore, profile, rest = with_run_named(text).split("; ")
    assert data == "`ratel data 'my run.yaml' seed=3 'datasets=a b' --bad`"
    assert restore == "`ratel restore 'my run.yaml' seed=3 'datasets=a b'`"
    assert profile == "`ratel profile 'my run.yaml' --refresh`", "it takes no overrides"
    assert rest == "CONFIG"
    forget_run()
    assert with_run_named(text) == text


def test_an_error_about_another_run_names_that_one() -> None:
    name_run(Path("mine.yaml"))
    with pytest.raises(BadInput) as raised, errors_about(Path("outputs/theirs")):
        raise BadInput("it is damaged", "restore it with `ratel restore CONFIG`")
    assert raised.value.hint is not None
    assert with_run_named(raised.value.hint) == "restore it with `ratel restore outputs/theirs`"


@pytest.mark.parametrize("made_by", ["venv", "uv", "pipx", "elsewhere"])
def test_packages_are_installed_where_ratel_is(made_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = tmp_path / "my env"
    python = prefix / "bin" / "python"
    (prefix / "bin").mkdir(parents=True)
    monkeypatch.setattr("sys.prefix", str(prefix))
    monkeypatch.setattr("sys.executable", str(python))
    if made_by == "pipx":
        (prefix / "pipx_metadata.json").write_text("{}")
    has_pip = made_by in ("venv", "elsewhere")
    found = {"uv": "/usr/bin/uv", "pip": str(prefix / "bin" / "pip" if made_by == "venv" else "/usr/bin/pip")}
    monkeypatch.setattr("shutil.which", found.get)
    monkeypatch.setattr("ratel_cli.commands.find_spec", lambda name: name if has_pip else None)
    before = {
        "venv": ["pip", "install"],
        "uv": ["uv", "pip", "install", "--python", str(python)],
        "pipx": ["pipx", "runpip", "my env", "install"],
        "elsewhere": [str(python), "-m", "pip", "install"],
    }
    assert shlex.split(pip_install("one>=1.0", "two")) == [*before[made_by], "one>=1.0", "two"]
    monkeypatch.chdir(tmp_path)
    if made_by == "elsewhere":
        assert pip_install("one") == "'my env/bin/python' -m pip install one", "shorter from here"


def test_an_extra_is_installed_by_the_packages_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any index has these, wherever Ratel itself came from."""
    needed = ["torch>=2.11", 'wandb>=0.19; extra == "wandb"', "mistral-common[sentencepiece]>=1.9 ; extra == 'mistral'"]
    monkeypatch.setattr("ratel_cli.commands.requires", lambda name: needed)
    assert install_extras("mistral") == pip_install("mistral-common[sentencepiece]>=1.9")
    assert install_extras("wandb", "mistral") == pip_install("wandb>=0.19", "mistral-common[sentencepiece]>=1.9")
    monkeypatch.setattr("ratel_cli.commands.requires", lambda name: None)
    clone = Path(__file__).parents[1]
    assert install_extras("wandb", "plot") == pip_install(f"{clone}[wandb,plot]"), "nothing is known of it"
