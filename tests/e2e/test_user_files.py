"""Files of the user's survive every command in every order, byte for byte.

One tree has a run, another run with a store on the same drive, a base model, a diffusion transformer, a folder of the
user's in which commands are called, the user's cache, and the user's files in every directory that the run has made.
One of the two runs trains an adapter.
Each sequence begins with this tree, most of them with one more file of the user's, which has the name of one of a run's
files. It runs random commands, none of which insists (`--overwrite`, `--overwrite-store`). After each command every
file that is not the run's own is what it was; after one that only reads, so is everything else. All commands and all
their other options are drawn.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from tests.e2e.drawn_commands import commands_of, draw_sequence
from tests.e2e.planted import NOTHING, Content, Tree
from tests.e2e.runs import assert_rejected, ratel, works
from tests.tiers import sample

NUM_GROUPS = 32
NUM_SEQUENCES = 8
"""In each group: 256 in all. The short tier has 2 groups."""
READ_ONLY = ("bench", "check", "data", "doctor", "env", "eval", "explain", "status", "verify")
WRITES_WITH = {"clean": "--yes", "generate": "-o", "import": "-o", "plan": "--plot", "schema": "-o"}
"""Commands that write only with this option."""
INSISTS = ("--overwrite", "--overwrite-store")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def with_an_adapter(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The other way round: the run trains an adapter, and the other run all weights."""
    return Tree(tmp_path_factory.mktemp("adapter"), what="lora", other="all weights")


@pytest.fixture(autouse=True)
def _in_the_tree(planted: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.begin()
    enter(planted, monkeypatch)


def enter(planted: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home, caches, temporary files and the current directory are in the tree."""
    monkeypatch.setenv("HOME", str(planted.work / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(planted.cache))
    monkeypatch.setattr(tempfile, "tempdir", str(planted.temporary))
    monkeypatch.chdir(planted.mine)


@pytest.mark.full
@pytest.mark.parametrize("group", sample(range(NUM_GROUPS), every=NUM_GROUPS, offset=5))
def test_they_survive_every_command_in_every_order(
    planted: Tree, with_an_adapter: Tree, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, trees = set(), (planted, with_an_adapter)
    for number in range(NUM_SEQUENCES):
        planted = trees[(group + number) % 2]
        planted.begin(group * NUM_SEQUENCES + number)
        enter(planted, monkeypatch)
        own, now = planted.own_files(), planted.contents()
        before = {
            name: content
            for name, content in now.items()
            if name not in own and (content is not None or Path(name).name in ("deep", "empty"))
        }
        commands = []
        for command in draw_sequence(group * NUM_SEQUENCES + number, planted):
            commands.append(command)
            ended = ratel(*command)
            codes.add(ended.code)
            assert ended.code in (0, 2, 3, 4), (commands, ended.stderr)
            earlier, now = now, planted.contents()
            changed = [name for name in before if name not in now or now[name] != before[name]]
            changed += [name for name in now if Path(name).name.startswith(NOTHING)]
            assert changed == [], (commands, ended.stderr)
            if _reads_only(*command):
                assert _differences(earlier, now, besides=planted.cache) == [], (commands, ended.stderr)
    assert {0, 2} <= codes, "some commands must work, and some must be refused"


def _reads_only(name: str, *arguments: str) -> bool:
    """Whether a command line promises to write nothing but what it caches."""
    if name == "report":
        return "--terminal" in arguments and "-o" not in arguments
    if name in WRITES_WITH:
        return WRITES_WITH[name] not in arguments
    return name in READ_ONLY or "--dry-run" in arguments


def _differences(one: dict[str, Content], other: dict[str, Content], *, besides: Path) -> list[str]:
    """The paths that differ, except those in a directory."""
    paths = (name for name in one.keys() | other.keys() if not name.startswith(f"{besides}/"))
    return sorted(name for name in paths if (name in one, one.get(name)) != (name in other, other.get(name)))


def test_every_command_and_every_option_is_drawn(planted: Tree) -> None:
    """But those that insist. The program says which there are."""
    drawn = Counter[tuple[str, str]]()
    for number in range(NUM_GROUPS * NUM_SEQUENCES):
        for name, *arguments in draw_sequence(number, planted):
            drawn.update({(name, each) for each in ("", *arguments)})
    for name, options in commands_of().items():
        assert drawn[name, ""] >= 20, name
        assert not any(drawn[name, each] for each in INSISTS)
        for option in options:
            if not {*INSISTS, "--help"} & {*option}:
                assert sum(drawn[name, each] for each in option) >= 5, (name, option)


@pytest.mark.parametrize(
    ("shell", "rc"), [("bash", ".bashrc"), ("zsh", ".zshrc"), ("fish", ".config/fish/config.fish")]
)
def test_installing_completion_only_appends(
    planted: Tree, monkeypatch: pytest.MonkeyPatch, shell: str, rc: str
) -> None:
    """The one command that writes into a file of the user's, which says so."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    file = planted.work / "home" / rc
    file.parent.mkdir(parents=True)
    file.write_text("alias mine=ls\n")
    before = planted.contents()
    with pytest.raises(SystemExit):
        main(["--install-completion", shell])
    after = planted.contents()
    assert file.read_text().startswith("alias mine=ls\n")
    assert [name for name in before if after.get(name, b"") != before[name] and name != str(file)] == []
    assert len(after) > len(before)


def test_images_come_beside_other_files(planted: Tree) -> None:
    """Unless one of these has an image's name: then no image is made."""
    before = planted.contents()
    options = ("--denoising-steps", 1, "-o", planted.mine)
    assert_rejected(ratel("generate", planted.denoiser, "--class", 2, *options), 2, "class-2-0.png: the file exists")
    assert planted.contents() == before
    works("generate", planted.denoiser, "--class", 1, *options)
    new = {str(planted.mine / name) for name in ("class-1-0.png", "latents.safetensors")}
    assert _differences(before, planted.contents(), besides=planted.cache) == sorted(new)


def test_the_test_can_fail(planted: Tree) -> None:
    """With a command that insists."""
    before = planted.contents()
    works("export", planted.config, "-o", planted.mine, "--overwrite")
    assert planted.contents()[str(planted.mine / "README.md")] != before[str(planted.mine / "README.md")]
