"""What the documents promise and a machine can check: links, commands, configs, paths, keys, exit codes.

The documents are README.md, CONTRIBUTING.md, CHANGELOG.md, kernels/README.md, examples/README.md, .github/*.md,
docs/*.md, docs/guide/*.md and docs/records/*.md.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

import pytest
import typer
import yaml

from ratel_cli import errors
from ratel_cli.cli import app as command_line
from ratel_cli.cli.app import main
from ratel_cli.config.load import load_config
from ratel_cli.config.others.aliases import SECTIONS
from ratel_cli.errors import RatelError
from ratel_cli.planning.time.step_time import RESOURCES
from ratel_cli.run.inputs import settings
from ratel_cli.training.metrics import StepMetrics
from scripts import write_config_docs, write_tree
from tests.engine.architectures import ARCHITECTURES
from tests.test_layers import PARTS, WINGS

ROOT = Path(__file__).parents[1]
FRAGMENT = re.compile(r"(Of|That|Those|And|So|But|Also|The same|With which|In which)\b")
"""How a docstring begins that cannot stand alone."""
DOCUMENTS = tuple(
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "kernels/README.md",
        "examples/README.md",
        ".github/*.md",
        "docs/*.md",
        "docs/guide/*.md",
        "docs/records/*.md",
    )
    for path in sorted(ROOT.glob(pattern))
)
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
EVERY_DOCUMENT = pytest.mark.parametrize("name", TEXTS)

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
_PARTS = ("ratel_cli", "scripts", "examples", "configs", "kernels", "tests", "docs")
GROUND = ("console", "commands", "json_fields", "closing", "sizes", "units", "errors")
_PATH = re.compile(rf"`((?:{'|'.join(_PARTS)})/[\w./-]+|\.constraints\.txt|\.ci/run)`")


def blocks(language: str, *names: str) -> list[str]:
    """The fenced blocks in that language, of these documents or of all."""
    return [body for name in names or TEXTS for _, found, body in _FENCE.findall(TEXTS[name]) if found == language]


def prose(name: str) -> str:
    """A document without its fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", TEXTS[name]), flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every command line in the documents: those in blocks, and `make ...` in the text."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    inline = [line for name in TEXTS for line in re.findall(r"`(make [a-z]+)`", prose(name))]
    words = [shlex.split(line, comments=True) for line in (*lines, *inline)]
    return [list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), each)) for each in words]


def called(program: str) -> list[list[str]]:
    """The arguments of each command that calls this program."""
    return [words[1:] for words in commands() if words and Path(words[0]).name == program]


def make_targets() -> dict[str, list[str]]:
    """Each target and its recipe's lines."""
    targets: dict[str, list[str]] = {}
    for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([^\t#:]+):(?!=)", line):
            recipe = targets.setdefault(match[1], [])
        elif line.startswith("\t") and targets:
            recipe.append(line.strip())
    return targets


def anchors(text: str) -> Iterator[str]:
    """The anchors that GitHub gives a document's headings."""
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", _FENCE.sub("", text), flags=re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = seen.get(slug, 0)
        seen[slug] = number + 1
        yield f"{slug}-{number}" if number else slug


def broken_links(directory: Path, text: str) -> list[str]:
    """The relative links of a document that lead nowhere."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = directory / path if path else None
        if target is not None and not target.exists():
            broken.append(link)
        elif anchor:
            linked = text if target is None else target.read_text(encoding="utf-8")
            broken += [] if anchor in set(anchors(linked)) else [link]
    return broken


@EVERY_DOCUMENT
def test_links_lead_somewhere(name: str) -> None:
    assert broken_links((ROOT / name).parent, _FENCE.sub("", TEXTS[name])) == []


def test_the_test_of_links_can_fail() -> None:
    text = "# A `b` heading: c\n[1](README.md) [2](#a-b-heading-c) [3](nowhere.md) [4](#nowhere) [5](README.md#nowhere)"
    assert broken_links(ROOT, text) == ["nowhere.md", "#nowhere", "README.md#nowhere"]


@EVERY_DOCUMENT
def test_paths_in_the_text_are_there(name: str) -> None:
    assert [path for path in _PATH.findall(prose(name)) if not (ROOT / path).exists()] == []


def test_make_targets_exist_and_are_short() -> None:
    named = {target for arguments in called("make") for target in arguments}
    assert {"demo", "test"} <= named
    assert named <= make_targets().keys()
    assert all(len(recipe) <= 3 for recipe in make_targets().values())


def test_every_make_target_is_in_the_documents() -> None:
    named = {target for arguments in called("make") for target in arguments}
    explained = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert explained - named <= {"help"}


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
    [parts] = re.findall(r"^check: ([a-z ]+?) +##", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    called = [word for line in lines for word in line.split()[1:] if word.isalpha()]
    assert called == parts.split(), "CI runs the parts of `make check`, in their order"


def test_commands_are_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those with a config are run as they stand, with one that does not exist: they get as far as missing it."""
    group = typer.main.get_command(command_line.app)
    for arguments in called("ratel"):
        with group.make_context("ratel", list(arguments)):  # raises for an unknown command or option
            pass
        if any(word.endswith(".yaml") for word in arguments) and arguments[0] != "init":  # it writes its config
            code = main([str(tmp_path / word) if word.endswith(".yaml") else word for word in arguments])
            printed = capsys.readouterr().err
            assert (code, "no such file" in printed) == (2, True), printed
    assert len(called("ratel")) >= 3


def test_the_test_of_commands_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "my-run.yaml", "--resume", "sometimes"]) == 2
    assert "no such file" not in capsys.readouterr().err


def test_scripts_that_are_called_exist_with_their_options() -> None:
    calls = called("python")
    for arguments in calls:
        path = Path(arguments[1].replace(".", "/") + ".py") if arguments[0] == "-m" else Path(arguments[0])
        if path.parts[0] not in _PARTS:
            continue
        if not (ROOT / path).exists():  # a package is started by its main program
            path = path.with_suffix("") / "__main__.py"
        source = (ROOT / path).read_text(encoding="utf-8")
        for module in re.findall(r"^from (scripts[.\w]+) import", source, flags=re.MULTILINE):
            source += (ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        options = [word for word in arguments[2:] if word.startswith("--")]
        assert [option for option in options if f'"{option}"' not in source] == [], arguments
    assert calls


def test_configs_load(tmp_path: Path) -> None:
    """Whole configs load without a notice, and with the overrides in the document. Parts load in a whole one."""
    path = tmp_path / "my-run.yaml"
    for text in blocks("yaml"):
        whole = text if "base_model:" in text else f"base_model: org/name\n{text}"
        whole = whole if "datasets:" in whole else f"{whole}\ndatasets: train.jsonl\n"
        path.write_text(whole, encoding="utf-8")
        assert load_config(path).notices == (), text
        path.write_text(f"{whole}\nno_such_key: 1\n", encoding="utf-8")
        with pytest.raises(RatelError):
            load_config(path)
    assert blocks("yaml", "README.md")


def test_overrides_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "my-run.yaml"
    path.write_text("base_model: org/name\ndatasets: train.jsonl\n", encoding="utf-8")
    overrides = [word for arguments in called("ratel") for word in arguments if "=" in word]
    overrides += [word for name in TEXTS for word in re.findall(r"`([a-z_.0-9]+=[^` ]+)`", prose(name))]
    for override in overrides:
        if override.split("=")[0].split(".")[0] in SECTIONS[""].model_fields:
            load_config(path, [override])
    assert overrides


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    assert load_config(path).notices == ()
    assert yaml.safe_load(path.read_text())["base_model"].startswith("demo/")


def listed(tree: str) -> Iterator[tuple[str, str]]:
    """The paths in a tree with one line a file, and what each line says. Two spaces a level; folders end with "/"."""
    above: list[str] = []
    for line in tree.splitlines():
        name, _, words = line.strip().partition(" ")
        above[(len(line) - len(line.lstrip())) // 2 :] = [name]
        yield "".join(above), words.strip()


def test_the_tree_is_that_of_the_files() -> None:
    text = TEXTS["docs/architecture.md"]
    assert write_tree.written_tree(text) == text, f"the tree is out of date; run: {write_tree.COMMAND}"
    [tree] = [block for block in blocks("text", "docs/architecture.md") if block.startswith("ratel_cli/")]
    lines = list(listed(tree))
    assert [path for path, words in lines if not words] == [], "a module or a package without a docstring"
    assert [path for path, _ in lines if not (ROOT / path).exists()] == []


def test_the_layers_are_those_of_the_layer_test() -> None:
    [text] = [block for block in blocks("text", "docs/architecture.md") if block.startswith("cli ")]
    *parts, ground = [line.split("  ")[0].split() for line in text.splitlines()]
    named = [*(part for [part] in parts), *ground]
    assert [part for part in named if part not in GROUND] == [part for part in reversed(PARTS) if part not in GROUND]
    assert set(named) == set(PARTS)
    wings = {line.split()[0]: line.partition(": ")[2] for line in text.splitlines() if ": " in line}
    for part, names in WINGS.items():
        assert wings[part].startswith(", ".join(name for name in names if name != "context"))


def docstrings(source: str) -> Iterator[str]:
    """All texts that are statements: of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text.strip()


def test_docstrings_stand_alone() -> None:
    """None goes on with what the one before it said. Those of the config's keys stand in a list, under their names."""
    found = {
        str(path.relative_to(ROOT)): fragments
        for path in sorted((ROOT / "ratel_cli").rglob("*.py"))
        if path.parent.name != "keys" and (fragments := [*filter(FRAGMENT.match, docstrings(path.read_text()))])
    }
    assert found == {}


def test_a_fragment_is_found() -> None:
    source = '"""Of the head."""\nx = 1\n"""So for the norm."""\n\ndef f():\n    """Offers a sum."""\n    "That"\n'
    assert [*filter(FRAGMENT.match, docstrings(source))] == ["Of the head.", "So for the norm.", "That"]


def test_modules_that_docstrings_name_are_there() -> None:
    """Either as paths or with dots, within the package."""
    parts = "|".join(
        path.name for path in (ROOT / "ratel_cli").iterdir() if path.is_dir() and path.name != "__pycache__"
    )
    named = re.compile(rf"(?<![\w./-])((?:{parts})(?:/[a-z_\d]+)+\.py|(?:{parts})(?:\.[a-z_]+)+)(?![\w(])")
    other = re.compile(r"\.(json|safetensors|yaml|html|md|layers)$")  # files of users, and names of modules
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "ratel_cli").rglob("*.py"))
        for text in docstrings(path.read_text(encoding="utf-8"))
        for name in named.findall(text)
        if not other.search(name) and not _is_module(name)
    }
    assert missing == set()


def _is_module(name: str) -> bool:
    """Whether there is such a file or folder, or a module whose attribute it may be."""
    path = ROOT / "ratel_cli" / (name if name.endswith(".py") else name.replace(".", "/"))
    return path.exists() or path.with_suffix(".py").exists() or path.parent.with_suffix(".py").exists()


def words_in(path: Path) -> str:
    """The words of the names that a file binds, and its texts, in lower case."""
    words = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                words.append(re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name))
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                words.append(name.replace("_", " "))
            case ast.Constant(value=str(text)):
                words.append(text)
    return " ".join(" ".join(words).replace("-", " ").lower().split())


def misplaced(glossary: str) -> list[str]:
    """The words of a glossary that no file of their entry defines."""
    entries = re.findall(r"^\*\*(.+?)\.\*\* ((?:.+\n)+)", glossary, flags=re.MULTILINE)
    wrong = []
    for names, text in entries:
        homes = " ".join(words_in(ROOT / path) for path in _PATH.findall(text))
        words = [name.lower().replace("-", " ") for name in names.split(", ")]
        wrong += [word for word in words if not re.search(rf"\b{word}", homes)]
    return wrong


def test_words_of_the_glossary_are_in_the_files_it_names() -> None:
    assert TEXTS["docs/glossary.md"].count("\n**") > 50
    assert misplaced(TEXTS["docs/glossary.md"]) == []


def test_the_test_of_the_glossary_can_fail() -> None:
    entries = (
        "**Tier.** A level.\n`ratel_cli/units.py`\n\n**Page, gremlin.** 4096. `ratel_cli/sizes.py`\n\n**Slot.** No.\n"
    )
    assert misplaced(entries) == ["tier", "gremlin", "slot"]


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 200


def test_every_key_of_the_config_is_documented() -> None:
    current = write_config_docs.DESTINATION.read_text(encoding="utf-8") == write_config_docs.config_page()
    assert current, f"docs/config.md is out of date; run: {write_config_docs.COMMAND}"


def test_every_architecture_that_is_tested_is_named() -> None:
    [listed_there] = re.findall(r"by the tests: (.*?)\.", prose("docs/guide/models.md"), flags=re.DOTALL)
    tested = sorted({name.removesuffix("_tied") for name in ARCHITECTURES})
    assert sorted(listed_there.replace("-", "_").replace("\n", " ").split(", ")) == tested
    assert f"{len(tested)} architectures" in TEXTS["README.md"]


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \| (.*) \|$", TEXTS["docs/guide/troubleshooting.md"], flags=re.MULTILINE)
    codes = {
        each.exit_code for each in vars(errors).values() if isinstance(each, type) and issubclass(each, RatelError)
    }
    closed = str(command_line.EXIT_OUTPUT_CLOSED)
    assert [code for code, _ in rows] == ["0", *map(str, sorted(codes)), "130, 143", closed]


def rows_of_table(name: str, heading: str) -> list[str]:
    """The first cells of the table that follows these words."""
    _, _, after = TEXTS[name].partition(heading)
    [table, *_] = re.findall(r"(?:^\|.*\n)+", after, flags=re.MULTILINE)
    return [row.split("|")[1].strip() for row in table.splitlines()[2:]]


def test_every_key_of_the_metrics_is_explained() -> None:
    cells = rows_of_table("docs/guide/output.md", "Keys in `run/metrics.jsonl`:")
    keys = [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]
    assert sorted(keys) == sorted(["checksum", *(field.name for field in dataclasses.fields(StepMetrics))])


def test_keys_that_a_resumed_run_must_share_are_listed() -> None:
    _, _, after = prose("docs/guide/resume-and-save.md").partition("rejected, with both values of each key:")
    listed_there = re.findall(r"`(\w+)`", after.split("\n\n")[1])
    assert listed_there == ["base_model", "random_init", *settings.DECIDES_THE_BITS]


GUIDE = [name for name in TEXTS if name.startswith("docs/guide/")]
SAMPLES = [block for block in blocks("text", "README.md", *GUIDE) if re.match(r"(model|compute|what) ", block)]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.split("\n")[0][:30])
def test_samples_have_the_labels_of_today(sample: str) -> None:
    """The first column of each row that a sample shows is a word of the report."""
    sources = [path for part in ("report", "planning", "run") for path in (ROOT / "ratel_cli" / part).rglob("*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sources]
    words = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)} | {*RESOURCES}
    labels = re.findall(r"^([a-zA-Z][\w ]*?)  +\S", sample, flags=re.MULTILINE)
    assert len(labels) >= 4 or sample.startswith("what")
    assert [label for label in labels if label not in words and not re.match(r"step \d|model\.|> ", label)] == []


def test_the_sample_of_a_plan_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    [arguments] = {tuple(each) for each in called("ratel") if "configs/models/gpt-13b.yaml" in each}
    assert main([str(ROOT / word) if word.startswith("configs/") else word for word in arguments]) == 0
    printed = capsys.readouterr().out
    [whole] = [block for block in blocks("text", *GUIDE) if block.startswith("model      gpt-13b")]
    assert printed == whole, "paste what the command prints into docs/guide/memory-and-devices.md"
