"""scripts/compare_revisions.py: what it calls a difference, what it leaves out, and that it finds one changed bit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts import compare_revisions
from scripts.compare_revisions import (
    DTYPES,
    HEAD,
    HOOKED,
    KINDS,
    NOT_INSTALLED,
    ROOT,
    TABLE,
    Inputs,
    Job,
    Outcome,
    Row,
    compare_outcomes,
    compared,
    different,
    drawn,
    equal_families,
    install_both,
    main,
    run,
    summary,
    table_line,
    tensor_hashes,
)

NAMES = ("1111111", "2222222")
TRAINED = Outcome(steps={"step 1": "2.5 1.0"}, tensors={"a": "1", "b": "2"}, fields={"a w32": "3", "a master": "3"})


def rows_of(before: Outcome, after: Outcome) -> Row:
    return compare_outcomes("demo", before, after, names=NAMES)


def test_what_is_different() -> None:
    assert different({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) == []
    assert different({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == ["b"]
    assert different({"a": "1", "b": "2"}, {"b": "2", "c": "1"}) == ["a", "c"]


def test_equal_outcomes() -> None:
    row = rows_of(TRAINED, replace(TRAINED))
    assert table_line(row.cells()) == "| demo | 1 | 2 | 2 | equal |"
    assert not row.differences


@pytest.mark.parametrize(("change", "found"), [
    ({"steps": {"step 1": "2.5 1.1"}}, "1 of 1 steps: step 1"),
    ({"tensors": {"a": "1", "b": "9"}}, "1 of 2 tensors: b"),
    ({"tensors": dict.fromkeys("abcde", "9")}, "5 of 5 tensors: a, b, c and 2 more"),
    ({"fields": {"a w32": "3"}}, "1 of 2 fields: a master"),
])  # fmt: skip
def test_differences_are_named(change: dict[str, dict[str, str]], found: str) -> None:
    assert rows_of(TRAINED, replace(TRAINED, **change)).differences == (found,)  # type: ignore[arg-type]


def test_what_the_revision_before_refuses_is_left_out() -> None:
    row = rows_of(Outcome(refusal="no | such model"), TRAINED)
    assert table_line(row.cells()) == "| demo |  |  |  | left out: 1111111 refuses it: no / such model |"
    assert not row.differences


def test_other_failures_are_differences() -> None:
    assert rows_of(TRAINED, Outcome(refusal="no")).differences == ("only 2222222 refuses it: no",)
    assert rows_of(Outcome(failure="exit code 1: a"), Outcome(refusal="no")).differences == (
        "1111111 failed: exit code 1: a",
    )
    assert rows_of(Outcome(), Outcome()).differences == ("nothing to compare",)


def test_the_hash_of_a_tensor_is_that_of_its_bits(tmp_path: Path) -> None:
    weights = {"zero": torch.zeros(3, dtype=torch.bfloat16), "one": torch.ones(2, 2), "number": torch.tensor(4)}
    found = []
    for number, zero in enumerate((0.0, 0.0, -0.0)):
        weights["zero"][1] = zero
        (tmp_path / str(number)).mkdir()
        save_file(weights, tmp_path / str(number) / "model.safetensors")
        found.append(tensor_hashes(tmp_path / str(number)))
    assert different(found[0], found[1]) == []
    assert different(found[0], found[2]) == ["zero"]
    assert found[0]["one"].startswith("torch.float32 [2, 2] ")
    assert found[0].keys() == weights.keys()


def test_families_are_drawn_by_the_seed() -> None:
    families = equal_families(TABLE.read_text(encoding="utf-8"))
    assert len(families) > 100
    assert {"llama", "gemma2"} < set(families)
    assert drawn(families, 3) == drawn(families, 3) != drawn(families, 4)
    assert sorted([*drawn(families, 3), "llama"]) == sorted(families)
    assert equal_families("| a | A | equal | equal | packed |  |\n| b | B | equal | refused | packed | no |\n") == ["a"]


class FakeInputs(Inputs):
    """Makes no files. Every family that begins with "g" keeps parameters in fp32."""

    def job(self, name: str) -> Job:
        return Job(name=name, settings={})

    def kept_parameters(self, family: str) -> list[str]:
        return ["norm.weight"] if family.startswith("g") else []


def rows_with(
    tmp_path: Path, refused: Callable[[str], bool], jobs: Sequence[str] | None = None, num_families: int = 4
) -> list[Row]:
    def compare(job: Job) -> Row:
        return Row(job=job.name, left_out="refused" if refused(job.name) else "")

    inputs = FakeInputs(tmp_path)
    return list(compared(inputs, compare, jobs=jobs, num_families=num_families, seed=0))


def test_another_family_is_drawn_for_one_that_is_refused(tmp_path: Path) -> None:
    order = drawn(equal_families(TABLE.read_text(encoding="utf-8")), 0)
    refused = order[1]
    rows = rows_with(tmp_path, lambda name: name.startswith(f"{refused}-"))
    llamas = [f"llama-{dtype}" for dtype in DTYPES]
    num_fixed = 1 + len(llamas) + len(KINDS) + 1
    fixed, families = rows[:num_fixed], rows[num_fixed:]
    assert [row.job for row in fixed] == ["demo", *llamas, *KINDS, HOOKED]
    assert [row.job for row in families if row.job.endswith("-float32")] == [f"{name}-float32" for name in order[:5]]
    assert [row.job for row in families if row.left_out == "refused"] == [f"{refused}-float32"]
    halves = [row for row in families if row.job.endswith("-bfloat16")]
    assert [row.job for row in halves] == [f"{name}-bfloat16" for name in order[:5] if name != refused]
    assert all(row.left_out == ("norm.weight in fp32" if row.job.startswith("g") else "") for row in halves)


def test_a_job_with_a_name_is_not_left_out(tmp_path: Path) -> None:
    [row] = rows_with(tmp_path, lambda name: True, jobs=["demo"])
    assert (row.left_out, row.differences) == ("", ("refused",))
    assert rows_with(tmp_path, lambda name: name == "demo", num_families=0)[0].differences == ("refused",)


@pytest.mark.parametrize(("differences", "code"), [((), 0), (("1 of 2 tensors: b",), 1)])
def test_a_difference_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], differences: tuple[str, ...], code: int
) -> None:
    rows = [Row(job="demo", differences=differences), Row(job="gpt2-bfloat16", left_out="no")]
    monkeypatch.setattr(compare_revisions, "install_both", lambda *arguments: (None, None))
    monkeypatch.setattr(compare_revisions, "compared", lambda *arguments, **options: rows)
    assert main(["HEAD"]) == code
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == table_line(HEAD)
    assert printed[2:] == [*(table_line(row.cells()) for row in rows), summary(rows)]
    assert printed[-1] == f"2 jobs: {1 - code} equal, {code} differ, 1 left out"


def test_a_job_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama", "llama-int8", "no_family-float32"):
        with pytest.raises(SystemExit):
            main(["HEAD", "--jobs", name])
        printed = " ".join(capsys.readouterr().err.split())
        assert f"unknown job {name}: demo, llama-float32," in printed
        assert "two-ranks, latents, encoder-decoder, hooked-module, or a family and a dtype" in printed


def test_a_revision_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-revision"]) == NOT_INSTALLED
    assert "a revision cannot be installed" in capfd.readouterr().err


def test_the_demo_reads_what_was_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    settings = Inputs(tmp_path, demo_steps=2).job("demo").settings
    assert settings["base_model"] == str(tmp_path / "demo" / "base")
    assert settings["datasets"] == [{"path": str(tmp_path / "demo" / "topics.jsonl"), "type": "chat_template"}]
    assert (settings["max_steps"], settings["save_steps"]) == (2, 2)
    assert Inputs(tmp_path).job("demo").settings["max_steps"] == 80


@pytest.mark.nightly
def test_a_revision_equals_itself_and_nothing_else(tmp_path: Path) -> None:
    if subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, check=False).returncode != 0:
        pytest.skip("there is no git repository")
    first, second = install_both("HEAD", "HEAD", tmp_path / "revisions")
    job = Inputs(tmp_path / "inputs").job("llama-bfloat16")
    other = replace(job, settings={**job.settings, "learning_rate": 1.001e-3})
    outcomes = [
        run(revision, each, tmp_path / str(number))
        for number, (revision, each) in enumerate(((first, job), (second, job), (second, other)))
    ]
    equal = compare_outcomes(job.name, *outcomes[:2], names=NAMES)
    assert equal.differences == ()
    assert equal.num_fields == 5 * equal.num_tensors > 0, "two halves, their master, and two moments"
    changed = compare_outcomes(job.name, outcomes[0], outcomes[2], names=NAMES)
    assert [difference.split()[3].rstrip(":") for difference in changed.differences] == ["steps", "tensors", "fields"]
