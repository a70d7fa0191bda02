"""The report as a page: it loads nothing, has every section, hides no text, and says what is missing."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest

from ratel_cli.cli.app import main
from ratel_cli.console import RunLog
from ratel_cli.model.files.marker import MARKER_NAME
from ratel_cli.report.page.page import page_of
from ratel_cli.report.page.page_tables import predicted_table
from ratel_cli.report.page.run_report import RunReport, key_figures, state_words
from ratel_cli.report.page.terminal import report_lines
from ratel_cli.report.words.status import STATES
from ratel_cli.run.ask.report import report_of
from ratel_cli.run.files.run_directory import find_run
from ratel_cli.training.metrics import StepMetrics
from ratel_cli.units import format_seconds
from tests.hardware.profiles import WITH_GPU
from tests.report.recorded import FACTS, steps, write_metrics, write_run
from tests.report.test_run import plan
from tests.tiers import rotating

SECTIONS = ["curves", "resources", "predicted", "plan", "memory", "wear", "machine", "config"]
VOID = ("meta", "br")
FILES = ("plan.json", "hardware.json", "metrics.jsonl", "run.json")


class Page(HTMLParser):
    """A parsed page. Raises for elements that are not closed in their order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self._joins = False
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._joins = tag == "wbr"

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            if self._joins:  # a name that may be broken there
                data = self.texts.pop() + data
            self.texts.append(data)
        self._joins = False

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def every(self, tag: str) -> Iterator[dict[str, str | None]]:
        return (attributes for name, attributes in self.elements if name == tag)


def report(output: Path) -> RunReport:
    return report_of(find_run(output, RunLog(StringIO())))


def page(output: Path) -> Page:
    return Page(page_of(report(output)))


def made_run(tmp_path: Path, made: list[StepMetrics], **settings: object) -> Path:
    return write_run(tmp_path / "out", made, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 2, 42, 100, 1000])
def test_it_loads_nothing_and_has_every_section(tmp_path: Path, count: int) -> None:
    text = page_of(report(made_run(tmp_path, steps(count, eval_every=20), exported_step=count or None)))
    found = Page(text)
    assert not re.search(r"(?i)(https?:)?//(?!www\.w3\.org/2000/svg)[a-z]|@import|url\(", text)
    loading = {"src", "href", "srcset", "data", "action", "xlink:href"}
    assert [each for each in found.elements if loading & each[1].keys()] == []
    assert {tag for tag, _ in found.elements} & {"link", "img", "iframe", "object", "embed", "form"} == set()
    assert [each["id"] for each in found.every("section")] == SECTIONS
    [policy] = [each["content"] for each in found.every("meta") if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'")


@pytest.mark.parametrize("count", [1, 2, 42, 1000])
def test_every_number_in_a_chart_is_a_number(tmp_path: Path, count: int) -> None:
    made = steps(count)
    made[-1] = replace(made[-1], loss=math.nan, grad_norm=math.inf, applied=False)
    found = page(made_run(tmp_path, made))
    assert len(list(found.every("svg"))) >= 10
    for path in found.every("path"):
        assert re.fullmatch(r"[MLHVvZ0-9. -]+", path["d"] or ""), path
    for circle in found.every("circle"):
        assert all(math.isfinite(float(circle[key] or "nan")) for key in ("cx", "cy"))


def test_the_figures_are_those_of_the_steps(tmp_path: Path) -> None:
    made = steps(42, eval_every=10)
    shown = page(made_run(tmp_path, made)).text
    assert f"{made[-1].loss:.4f}" in shown and f"step 1: {made[0].loss:.4f}" in shown
    evaluated = [each for each in made if each.eval_loss is not None]
    best = min(evaluated, key=lambda each: each.eval_loss or 0)
    assert f"best {best.eval_loss:.4f}, step {best.step}" in shown
    assert "Stopped after step 42 of 100" in shown
    assert FACTS.software in shown
    for name in ("Loss", "Learning rate", "Gradient norm", "Speed", "Step time", "RAM", "Written", "Resources"):
        assert name in shown


@pytest.mark.parametrize("has_accuracies", [True, False])
def test_rewards_of_answers_that_are_compared(tmp_path: Path, has_accuracies: bool) -> None:
    """Answers with a verdict have no accuracy, and a step may lack bad ones."""
    made = []
    for each in steps(42):
        figures = {"rewards/chosen": 0.01 * each.step, "rewards/rejected": -0.02, "rewards/margins": 0.01 * each.step}
        figures |= {"rewards/accuracies": 0.75} if has_accuracies else {}
        made.append(replace(each, preferences=figures))
    made[7] = replace(made[7], preferences={"rewards/chosen": 0.1})
    shown = page(made_run(tmp_path, made))
    assert "Rewards" in shown.text and "Reward margin" in shown.text and "reward margin" in shown.text
    assert ("Reward accuracy" in shown.text) == has_accuracies and ("75 % of pairs" in shown.text) == has_accuracies
    for path in shown.every("path"):
        assert re.fullmatch(r"[MLHVvZ0-9. -]+", path["d"] or ""), path


def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    made = [replace(each, gpu_peak_bytes=20 << 30, num_alloc_retries=0) for each in steps(42)]
    output = made_run(tmp_path, made, keys="limits: {gpu_memory: 24GiB}\n")
    (output / "run" / "hardware.json").write_text(json.dumps(WITH_GPU.to_json()))
    shown = page(output).text
    for words in ("GPU memory as measured", "83 %", "22.6 GB/s up", "TFLOP/s of the model", "20.0 GiB"):
        assert words in shown, words
    assert "GPU memory" not in page(made_run(tmp_path / "cpu", steps(42))).text


def test_the_settings_are_those_of_the_run(tmp_path: Path) -> None:
    """A config that was changed after the run names the run, and says nothing about it."""
    output = made_run(tmp_path, steps(3), keys="learning_rate: 0.001\nlimits: {host_memory: 20GiB}\nmax_steps: 100\n")
    changed = tmp_path / "third.yaml"
    text = (output / "run" / "config.yaml").read_text().replace("20GiB", "30GiB").replace("0.001", "0.5")
    changed.write_text(f"{text}num_epochs: 33\n")
    found = report(changed)
    assert "learning_rate: 0.001" in found.config_text and "learning_rate: 0.001" in found.changed_keys
    assert "num_epochs: 33" not in found.config_text + found.changed_keys
    [note] = found.notes
    names = note.removeprefix("The config that was given has other values for ").partition(". ")[0].split(", ")
    assert sorted(names) == ["learning_rate", "limits.host_memory", "num_epochs"]
    for same in (output, output / "run" / "config.yaml"):
        assert report(same).notes == ()
    (output / "run" / "config.yaml").write_text("nonsense: [")
    [note] = report(changed).notes
    assert "run/config.yaml cannot be read" in note


def test_predicted_and_measured_go_together(tmp_path: Path) -> None:
    """Steps of an earlier plan, which took otherwise, count nowhere: every figure is of the same steps."""
    made = steps(30)
    slow = plan()
    predicted = slow.time.total
    made = [
        replace(
            each,
            clipped=True,
            step_seconds=8.0 + 0.1 * (each.step % 3) if each.step > 10 else 2.0,
            forward_seconds=3.0 + 0.1 * (each.step % 3) if each.step > 10 else 1.0,
            backward_seconds=5.0 if each.step > 10 else 1.0,
            predicted_seconds=predicted if each.step > 10 else 2.5,
        )
        for each in made
    ]
    found = report(made_run(tmp_path, made, made_plan=slow))
    assert [each.step for each in found.planned_steps] == list(range(11, 31))
    [step_time] = [each for each in key_figures(found) if each.name == "step time"]
    assert step_time.value == "8.10 s" and step_time.context.startswith("median of steps 11 to 30; predicted ")
    table = Page(predicted_table(found)).text.split("\n")
    rows = {name: table[table.index(name) + 1 : table.index(name) + 3] for name in ("step", "forward")}
    assert rows["step"] == [format_seconds(predicted), "8.10 s"] and rows["forward"][1] == "3.10 s"
    assert any(
        "the median of steps 11 to 30. Predicted: the plan that the run ended with. Res" in each for each in table
    )
    assert "8.10 s" in page_of(found)


def test_steps_whose_prediction_is_not_known_go_together(tmp_path: Path) -> None:
    found = report(made_run(tmp_path, [replace(each, predicted_seconds=math.nan) for each in steps(5)]))
    assert [each.step for each in found.planned_steps] == [2, 3, 4, 5]
    [step_time] = [each for each in key_figures(found) if each.name == "step time"]
    assert step_time.context == "median of steps 2 to 5"


def test_clipped_and_unclipped_steps_are_not_mixed(tmp_path: Path) -> None:
    made = [
        replace(each, clipped=not each.step % 4, step_seconds=9.0 if not each.step % 4 else 5.0) for each in steps(20)
    ]
    made = [replace(each, predicted_seconds=8.0 if each.clipped else 4.0) for each in made]
    found = report(made_run(tmp_path, made))
    assert {each.clipped for each in found.planned_steps} == {False}
    assert "that were not clipped" in Page(predicted_table(found)).text


def test_the_words_of_the_tables(tmp_path: Path) -> None:
    operators = [
        {"operator": f"aten.op_{number}", "blocks": 1, "bytes": 1 << 10, "flops": 1, "seconds": 0.026, "benefit": 1.0}
        for number in range(13)
    ]
    output = made_run(tmp_path, steps(3), facts=replace(FACTS, first_step=2))
    path = output / "run" / "plan.json"
    content = json.loads(path.read_text())
    content["activations"]["swap_set"] = operators
    path.write_text(json.dumps(content))
    shown = page(output).text
    assert "1 more operator\n" in shown and "26.6 s/MiB" in shown and "e+" not in shown
    assert "last resumed" in shown and f"{FACTS.started}, after step 2" in shown
    assert "waited for it" not in shown and "as predicted\n" not in shown


@pytest.mark.full
def test_the_script_reads_the_steps_that_are_drawn(tmp_path: Path) -> None:
    for count in (1, 42, 4001):
        text = page_of(report(made_run(tmp_path / str(count), steps(count))))
        match = re.search(r'<script type="application/json" id="steps">(.*?)</script>', text)
        assert match is not None
        table = json.loads(match[1], parse_constant=pytest.fail)
        numbers = [row[0] for row in table["rows"]]
        assert numbers == sorted(set(numbers)) and (numbers[0], numbers[-1]) == (1, count) and len(numbers) <= 1502
        assert {len(row) for row in table["rows"]} == {len(table["names"])}


def test_names_of_the_users_are_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><b onload='x'>&amp;"
    output = made_run(tmp_path / "<i>&", steps(3), keys=f"chat_template_jinja: {json.dumps(hostile)}\n")
    content = json.loads((output / "run" / "plan.json").read_text())
    content["model"]["name"] = hostile
    content["activations"]["swap_set"] = [
        {"operator": hostile, "blocks": 1, "bytes": 1, "flops": 1, "seconds": None, "benefit": 1.0}
    ]
    (output / "run" / "plan.json").write_text(json.dumps(content))
    text = page_of(report(output))
    found = Page(text)
    assert len(list(found.every("script"))) == 2 and not list(found.every("i onload")) and hostile not in text
    assert sum(each.count(hostile) for each in found.texts) >= 3


@pytest.mark.full
def test_a_long_run_is_a_small_file(tmp_path: Path) -> None:
    text = page_of(report(made_run(tmp_path, steps(5000, eval_every=100))))
    assert len(text) < 500_000
    assert "Each point is the mean of 18 steps." in text


@pytest.mark.parametrize(("garbage", "name"), rotating([None, "", "{", "[]", '{"format_version": 1}'], FILES))
def test_a_file_that_is_missing_or_damaged_is_said(tmp_path: Path, name: str, garbage: str | None) -> None:
    output = made_run(tmp_path, steps(3))
    path = output / "run" / name
    path.unlink()
    if garbage is not None:
        path.write_text(garbage)
    found = page(output)
    assert [each["id"] for each in found.every("section")] == SECTIONS
    if name in ("plan.json", "hardware.json"):
        assert f"run/{name} {'is not there' if garbage is None else 'cannot be read'}" in found.text
    if name == "metrics.jsonl":
        assert "No step is recorded yet" in found.text


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        ('{"step": 4, "lo', "only half written"),
        ("nonsense\n", "1 line of run/metrics.jsonl cannot be read"),
        ("nonsense\nmore\n", "2 lines of run/metrics.jsonl cannot be read"),
    ],
)
def test_a_broken_log_is_said(tmp_path: Path, rest: str, words: str) -> None:
    output = made_run(tmp_path, steps(3))
    write_metrics(output / "run" / "metrics.jsonl", steps(3), rest=rest)
    assert words in page(output).text
    assert any(words in line for line in report_lines(report(output), width=110))


def test_skipped_steps_are_said(tmp_path: Path) -> None:
    made = [replace(each, applied=each.step != 2) for each in steps(3)]
    assert "1 step had gradients that overflowed" in page(made_run(tmp_path, made)).text


def test_where_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = made_run(tmp_path, steps(3))
    assert main(["report", str(output)]) == 0
    first = (output / "run" / "report.html").read_text()
    assert "Stopped after step 3" in first
    write_metrics(output / "run" / "metrics.jsonl", steps(5))
    assert main(["report", str(output)]) == 0  # a report is replaced
    assert "Stopped after step 5" in (output / "run" / "report.html").read_text()
    elsewhere, before = tmp_path / "mine.html", os.umask(0o027)
    try:
        assert main(["report", str(output / "run" / "config.yaml"), "-o", str(elsewhere)]) == 0
    finally:
        os.umask(before)
    assert elsewhere.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "out", "out.store"]
    assert capsys.readouterr().out == ""


def test_a_file_of_the_users_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = made_run(tmp_path, steps(3))
    notes = tmp_path / "notes.html"
    notes.write_text("mine")
    assert main(["report", str(output), "-o", str(notes)]) == 2
    assert "it is not a report" in capsys.readouterr().err and notes.read_text() == "mine"
    assert main(["report", str(output), "-o", str(notes), "--overwrite"]) == 0
    assert notes.read_text() != "mine"
    for wrong in (tmp_path, tmp_path / "no" / "where.html", notes / "x", Path("/proc/none/x.html")):
        assert main(["report", str(output), "-o", str(wrong)]) == 2
    assert main(["report", str(output), "-o", "/proc/x.html"]) == 3
    assert "-o FILE" in capsys.readouterr().err


def test_there_may_be_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "not the output directory of a run" in capsys.readouterr().err
    config = tmp_path / "run.yaml"
    config.write_text(f"base_model: a/b\ndatasets: d\noutput_dir: {tmp_path / 'out'}\n")
    assert main(["report", str(config)]) == 2
    assert "has not begun" in capsys.readouterr().err
    (tmp_path / "out" / "run").mkdir(parents=True)
    for arguments in ([], ["-o", str(tmp_path / "r.html")], ["--terminal"]):
        assert main(["report", str(config), *arguments]) == 2
    assert not list((tmp_path / "out" / "run").iterdir()) and not (tmp_path / "r.html").exists()


def test_a_copy_that_ratel_did_not_make_gets_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = made_run(tmp_path, steps(3))
    (output / MARKER_NAME).unlink()
    (output / "run" / "plan.json").unlink()
    assert main(["report", str(output)]) == 2
    assert "-o FILE" in capsys.readouterr().err and not (output / "run" / "report.html").exists()
    assert main(["report", str(output), "-o", str(tmp_path / "r.html")]) == 0


@pytest.mark.parametrize(("count", "width"), rotating([0, 1, 2, 42, 1000], [20, 60, 80, 200]))
def test_the_terminal_shows_the_same(tmp_path: Path, count: int, width: int) -> None:
    lines = report_lines(report(made_run(tmp_path, steps(count, eval_every=20))), width=width)
    assert max(map(len, lines)) <= max(40, min(width, 110))
    assert lines[0] == "out" and (f"step {count} of 100" if count else "before its first step") in lines[1]
    if count > 1 and width >= 60:
        shown = "\n".join(lines)
        names = (
            "loss",
            "Learning rate, by step",
            "Gradient norm, ",
            "Speed, tokens/s",
            "Step time, seconds; +: predicted",
        )
        for name in (*names, "RAM, GiB, peak so far", "Written, GB, in all steps" if count < 80 else "", "compute"):
            assert name in shown, name


def test_the_terminal_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = made_run(tmp_path, steps(42))
    assert main(["report", str(output), "--terminal"]) == 0
    assert "Gradient norm" in capsys.readouterr().out
    assert not (output / "run" / "report.html").exists()
    for more in (["-o", str(tmp_path / "r.html")], ["--overwrite"]):
        assert main(["report", str(output), "--terminal", *more]) == 2
        ended = capsys.readouterr()
        assert ended.err.startswith(f"error: arguments '--terminal' and '{' '.join(more)}': --terminal writes no file")
        assert "Gradient norm" not in ended.out and not (tmp_path / "r.html").exists()


def test_each_state_is_a_sentence(tmp_path: Path) -> None:
    found = report(made_run(tmp_path, steps(42)))
    for state in STATES:
        for step in (0, 42, 100):
            words = state_words(replace(found, status=replace(found.status, state=state, step=step)))
            assert words[0].isupper() and words.endswith("."), words
    running = replace(found.status, state="running", seconds_left=93.0)
    assert state_words(replace(found, status=running)) == "Running: step 42 of 100, about 93 s left."
