"""What strangers meet first: workflows, issue forms, promises about security, image files, extras and notices.

None of it runs here, so it is parsed, and what it names must be there.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path

import nanobind
import pytest
import typer
import yaml

from ratel_cli.cli import app as command_line
from scripts import release
from tests.test_docs import make_targets

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
IMAGE = ROOT / "scripts" / "image" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_HOST = re.compile(r"https?://|\b[\w-]+\.(?:org|com|io|net|dev)\b")


def steps_of(workflow: object) -> list[dict[str, object]]:
    assert isinstance(workflow, dict)
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_what_is_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"} and workflow["jobs"]
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for expression in re.findall(r"\$\{\{ matrix\.([\w-]+) \}\}", yaml.safe_dump(job)):
            assert matrix[expression]
        assert {*matrix.get("target", ())} <= make_targets().keys()
    for step in steps_of(workflow):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", str(step["uses"])), "from GitHub itself, of a known version"
            continue
        words = shlex.split(str(step["run"]).replace("${{ matrix.target }}", "lint"))
        assert words[0] in ("make", "python")
        assert words[0] != "make" or words[1] in make_targets()


def test_ci_runs_the_short_tier_on_the_oldest_and_a_newer_python() -> None:
    ci = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())
    tests, style = ci["jobs"]["tests"], ci["jobs"]["style"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert tests["strategy"]["matrix"]["python-version"] == [oldest, "3.13"]
    assert tests["steps"][-1]["run"] == "make test PYTHON=python"
    assert style["strategy"]["matrix"]["target"] == ["lint", "types", "links"]


def test_wheels_are_built_for_both_architectures() -> None:
    wheels = yaml.safe_load((GITHUB / "workflows" / "wheels.yml").read_text())
    assert wheels["jobs"]["wheels"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert [path for path in wheels[True]["pull_request"]["paths"] if not [*ROOT.glob(path)]] == []  # `on` is true
    tools = PROJECT["tool"]
    images = {tools["cibuildwheel"][f"manylinux-{name}-image"] for name in ("x86_64", "aarch64")}
    assert images == {"manylinux_{}_{}".format(*release.OLDEST_LIBC)}
    stable = tools["scikit-build"]["wheel"]["py-api"]
    assert tools["cibuildwheel"]["build"] == ["cp311-manylinux_*", f"{stable}-manylinux_*"]
    for command in tools["cibuildwheel"]["test-command"]:
        understood(command)


def understood(command: str) -> None:
    """Fails for a command or an option that `ratel` does not have."""
    program, *arguments = shlex.split(command)
    assert program == "ratel"
    if arguments != ["--version"]:
        with typer.main.get_command(command_line.app).make_context("ratel", arguments):
            pass


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_asks_for_what_a_command_prints(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form.keys() == {"name", "description", "labels", "body"}
    assert len({field["id"] for field in form["body"]}) == len(form["body"])
    for field in form["body"]:
        assert field["type"] == "textarea" and field["attributes"]["label"]
        assert field.keys() <= {"type", "id", "attributes", "validations"}
        assert field["attributes"].keys() <= {"label", "description", "render"}
    text = yaml.safe_dump(form, width=10_000)
    commands = re.findall(r"`(ratel [^`]+)`", text)
    assert any(each.startswith("ratel env") for each in commands)
    assert any(each.startswith("ratel report") for each in commands)
    for command in commands:
        understood(command)
    [environment] = [field for field in form["body"] if field["id"] == "env"]
    assert environment["validations"]["required"]


def test_forms_are_there_and_may_be_left_out() -> None:
    assert [path.stem for path in FORMS] == ["bug", "speed"]
    config = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text())
    assert config == {"blank_issues_enabled": True, "contact_links": []}


def test_every_promise_about_security_has_a_test() -> None:
    text = (GITHUB / "SECURITY.md").read_text(encoding="utf-8")
    _, _, promises = text.partition("## What Ratel promises")
    rows = re.findall(r"^\| ([A-Z].*?) \|.*\| (.*?) \|$", promises, flags=re.MULTILINE)
    assert len(rows) >= 6
    for promise, shown_by in rows:
        named = re.findall(r"`(test_\w+)`(?: and `(test_\w+)`)? in `(tests/[\w/]+\.py)`", shown_by)
        assert named, promise
        for *tests, path in named:
            source = (ROOT / path).read_text(encoding="utf-8")
            assert [test for test in tests if test and f"def {test}(" not in source] == [], promise


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((GITHUB / "CITATION.cff").read_text(encoding="utf-8"))
    project = PROJECT["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, each with its arguments in one line."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in whole.splitlines()]


def test_the_image_is_made_of_what_is_there() -> None:
    """Bases are pinned, every file that is copied exists and is not ignored, and no compiler stays in it."""
    found = instructions(IMAGE.read_text(encoding="utf-8"))
    arguments = dict(value.partition("=")[::2] for name, value in found if name == "ARG")
    guide = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    named = re.findall(r"--build-arg BASE=([\w./:-]+)", guide + IMAGE.read_text(encoding="utf-8"))
    assert len(named) == 2 and len({*named}) == 1
    for base in (arguments["BASE"], *named):
        assert re.search(r":.*\d", base) and "latest" not in base
    # buildah of Debian 12 takes what stands in an argument for an image, never for a stage.
    assert [value.partition(" AS ")[0] for name, value in found if name == "FROM"] == ["${BASE}", "python", "python"]
    copied = [value.split() for name, value in found if name == "COPY"]
    sources = [word for words in copied for word in words[:-1] if not words[0].startswith("--from")]
    assert [source for source in sources if not (ROOT / source).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert [source for source in sources if f"!{source}" not in ignored] == []
    packages = {*sources, "CHANGELOG.md", "PKG-INFO"}
    assert packages == release.IN_SDIST, "a wheel is made of these"
    last = len(found) - 1 - [name for name, _ in reversed(found)].index("FROM")
    assert not re.search(r"\bg\+\+|\bgcc\b", " ".join(value for _, value in found[last:]))


def test_the_image_has_no_root_no_secret_and_no_host() -> None:
    found = instructions(IMAGE.read_text(encoding="utf-8"))
    [user] = [value for name, value in found if name == "USER"]
    assert user.isdigit() and int(user) > 0
    assert found.index(("USER", user)) > max(number for number, (name, _) in enumerate(found) if name == "RUN")
    assert dict(found)["ENTRYPOINT"] == '["ratel"]'
    text = IMAGE.read_text(encoding="utf-8")
    assert not re.search(r"token|password|secret|api_?key", text, flags=re.IGNORECASE)
    assert not _HOST.search(text)


def test_no_file_of_the_project_names_a_registrys_host() -> None:
    files = [*WORKFLOWS, *FORMS, ROOT / "pyproject.toml", ROOT / "docs" / "guide" / "install.md"]
    assert [path.name for path in files if _HOST.search(path.read_text(encoding="utf-8"))] == []


def test_every_extra_is_in_the_table() -> None:
    """With the packages that it brings."""
    text = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    _, _, after = text.partition("\n## Extras\n")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", after, flags=re.MULTILINE))
    extras = PROJECT["project"]["optional-dependencies"]
    assert rows.keys() == extras.keys()
    for name, packages in extras.items():
        needed = [re.split(r"[\[><=]", package)[0] for package in packages]
        assert name == "test" or rows[name] == ", ".join(needed)


def test_hints_name_no_package_of_which_no_index_may_know() -> None:
    """`ratel_cli.commands.install_extras` says how to install an extra."""
    files = [*(ROOT / "ratel_cli").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    named = [name for name, text in texts.items() if re.search(r"install '?ratel-cli|ratel-cli\[", text)]
    assert named == []


def test_the_notices_are_of_what_is_compiled_in() -> None:
    """Word for word those of nanobind, and of the tables that it brings along."""
    notices = " ".join((ROOT / "kernels" / "NOTICE").read_text(encoding="utf-8").split())
    licences = [path for path in distribution("nanobind").files or () if path.name == "LICENSE"]
    assert licences
    tables = Path(nanobind.__file__).parent / "ext" / "robin_map" / "include" / "tsl" / "robin_map.h"
    header = tables.read_text(encoding="utf-8").split("*/")[0].replace("/**", "").replace("\n *", "\n")
    for text in (*(Path(str(path.locate())).read_text(encoding="utf-8") for path in licences), header):
        assert " ".join(text.split()) in notices
    assert "Yann Collet" in notices and "XXH3" in (ROOT / "kernels" / "include" / "ratel" / "checksum.h").read_text()
    files = PROJECT["project"]["license-files"]
    assert tuple(files) == release.NOTICES and all((ROOT / name).is_file() for name in files)


def test_archives_with_too_much_or_too_little_are_refused(tmp_path: Path) -> None:
    whole = [f"ratel_cli-1/{name}" for name in release.IN_SDIST]
    release.check_sdist(whole)
    for names in ([*whole, "ratel_cli-1/tests/x.py"], whole[1:], [*whole, "ratel_cli-1/ratel_cli/_native.so"]):
        with pytest.raises(ValueError, match=r"too much or too little|does not belong there"):
            release.check_sdist(names)


def test_the_description_of_the_package_has_its_parts() -> None:
    """What an index shows of the installed one."""
    found = HeaderParser().parsestr(distribution("ratel-cli").read_text("METADATA") or "")
    assert found["Name"] == "ratel-cli" and found["Requires-Python"] == PROJECT["project"]["requires-python"]
    assert {*found.get_all("Provides-Extra", [])} <= PROJECT["project"]["optional-dependencies"].keys()
