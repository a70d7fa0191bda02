"""Shows that two revisions train the same bits: the same jobs with the same inputs, run by each revision's own code.

    python -m scripts.compare_revisions BEFORE             with HEAD
    python -m scripts.compare_revisions BEFORE AFTER --families 20 --seed 7
    python -m scripts.compare_revisions BEFORE --demo-steps 8 --families 0
    python -m scripts.compare_revisions BEFORE AFTER --jobs demo llama-float16 gemma2-bfloat16 two-ranks

The jobs: the demo, as configs/demo.yaml has it; a tiny Llama in fp32, bf16 and fp16; the other kinds of runs that
tests/golden has (adapters, Muon, preferences, ranks, a hooked module, ...), and an encoder-decoder; and tiny models of
families that docs/families.md calls equal, drawn by the seed, each in fp32 and in bf16. A family that BEFORE refuses is
left out, and another one is drawn. The bf16 run of a family of which transformers keeps parameters in fp32 is left out
too: revisions before 60e6440 trained them in bf16.

Of each job it compares the hash of every tensor of the export, the hash of every field that the store has of each
parameter (compute weights, fp32 master, both moments; not where ranks share the state), and the losses and norms of all
steps. It prints a line for each job. Exit code 1 if anything differs, or if a job fails; 125 if a revision cannot be
installed, which `git bisect` takes for one to skip:

    git bisect start --no-checkout BAD GOOD
    git bisect run .venv/bin/python -m scripts.compare_revisions GOOD BISECT_HEAD --jobs demo

Each revision is checked out into a temporary folder and compiled there, which takes a minute. It gets an environment
of its own, in which the packages of this one are found too. Invariant: inputs are made once, by neither revision; both
compute with the same torch and as many threads. Revisions before bef73bf cannot be read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from scripts import make_demo
from scripts.families import TABLE, save_base, training_rows
from scripts.family_configs import FAMILIES
from tests.golden.make import RUNS, Golden, write_run

ROOT = Path(__file__).parents[1]
DEMO = "demo"
NOT_INSTALLED = 125
DTYPES = ("float32", "bfloat16", "float16")
HEAD = ("job", "steps", "tensors", "fields", "result")
HOOKED = "hooked-module"
KINDS: Mapping[str, Golden] = {
    **{
        name.replace(" ", "-"): golden
        for name, golden in RUNS.items()
        if name not in ("full fp32", "full bf16", "fp16")
    },
    "encoder-decoder": Golden(keys={"dtype": "float32", "sample_packing": None}, kind="texts"),
}
"""By name: what else than a decoder's parameters is trained, or how. A hooked module has no config."""
_FIXED = (DEMO, *(f"llama-{dtype}" for dtype in DTYPES), *KINDS, HOOKED)
_RUN = ROOT / "scripts" / "revision_run.py"
_LOOP = ROOT / "tests" / "golden" / "loop.py"
_SECONDS = 1800
"""A job that takes longer has failed."""
_NAMED = 3
"""The most differences of one kind that a line names."""
_SETTINGS: Mapping[str, object] = {
    "shuffle": False,
    "sample_packing": False,
    "sequence_len": 48,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "warmup_ratio": 0.0,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "device": "cpu",
    "storage": {"engine": "threads"},
    "limits": {"host_memory": "4GiB"},
}
"""Of the tiny models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """A revision that can run jobs."""

    name: str
    python: Path
    """The interpreter of its environment."""
    package: Path
    """Where its code and its kernels are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What both revisions train."""

    name: str
    settings: Mapping[str, object]
    """The config, without what is different for each run: where the output and the store lie."""
    num_ranks: int = 1
    loop: Path | None = None
    """The program with the module and its loop, where a module is hooked and there is no config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a revision made of a job."""

    refusal: str = ""
    """Why it does not train it; empty if it did."""
    failure: str = ""
    """How it failed, where it neither trained nor refused."""
    steps: Mapping[str, str] = field(default_factory=dict)
    """By step: loss and norm."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """By name: dtype, shape and hash of a tensor of the export."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """By parameter and field: the hash of its values in the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    job: str
    num_steps: int = 0
    num_tensors: int = 0
    num_fields: int = 0
    left_out: str = ""
    """Why it was not compared; empty if it was."""
    differences: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        """The cells of the table, below `HEAD`."""
        if self.left_out:
            return (self.job, "", "", "", f"left out: {self.left_out}")
        result = "; ".join(self.differences) or "equal"
        return (self.job, str(self.num_steps), str(self.num_tensors), str(self.num_fields), result)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", metavar="BEFORE", help="a commit, branch or tag")
    parser.add_argument("after", metavar="AFTER", nargs="?", default="HEAD")
    parser.add_argument("--families", type=int, default=10, metavar="N", help="how many families to draw (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--demo-steps", type=int, metavar="N", help="steps of the demo; otherwise those of its config")
    parser.add_argument("--jobs", nargs="+", metavar="JOB", help="only these: demo, or FAMILY-DTYPE")
    options = parser.parse_args(arguments)
    for name in options.jobs or []:
        if name not in _FIXED and not _is_family_job(name):
            parser.error(f"unknown job {name}: {', '.join(_FIXED)}, or a family and a dtype, such as gpt2-float16")
    with tempfile.TemporaryDirectory(prefix="ratel-revisions-") as name:
        folder = Path(name)
        try:
            revisions = install_both(options.before, options.after, folder)
        except subprocess.CalledProcessError as error:
            print(f"a revision cannot be installed: {error}", file=sys.stderr)
            return NOT_INSTALLED
        inputs = Inputs(folder / "inputs", demo_steps=options.demo_steps)
        compare = _comparison(*revisions, folder / "runs")
        rows = []
        for row in compared(inputs, compare, jobs=options.jobs, num_families=options.families, seed=options.seed):
            rows.append(row)
            if len(rows) == 1:
                print(f"{table_line(HEAD)}\n|{'---|' * len(HEAD)}")
            print(table_line(row.cells()), flush=True)
    print(summary(rows))
    return 1 if any(row.differences for row in rows) else 0


def _is_family_job(name: str) -> bool:
    family, _, dtype = name.rpartition("-")
    return family in FAMILIES and dtype in DTYPES


def compared(
    inputs: Inputs, compare: Callable[[Job], Row], *, jobs: Sequence[str] | None, num_families: int, seed: int
) -> Iterator[Row]:
    """A row for each job, as soon as it is known. `jobs` None: the demo, the Llama, each kind and the drawn families.

    Only drawn families are left out, not jobs with a name.
    """
    for name in jobs or _FIXED:
        row = compare(inputs.job(name))
        yield replace(row, left_out="", differences=(row.left_out,)) if row.left_out else row
    wanted = 0 if jobs else num_families
    for family in drawn(equal_families(TABLE.read_text(encoding="utf-8")), seed):
        if wanted == 0:
            return
        row = compare(inputs.job(f"{family}-float32"))
        yield row
        if row.left_out:
            continue
        wanted -= 1
        kept = inputs.kept_parameters(family)
        name = f"{family}-bfloat16"
        yield Row(job=name, left_out=f"{_names(kept)} in fp32") if kept else compare(inputs.job(name))


def equal_families(table: str) -> list[str]:
    """The families that a table like docs/families.md calls equal, in fp32 and in bf16."""
    return re.findall(r"^\| (\S+) \| \S+ \| equal \| equal \|", table, flags=re.MULTILINE)


def drawn(families: Sequence[str], seed: int) -> list[str]:
    """The families in an order that depends on the seed alone; without Llama, which is always tried."""
    others = [family for family in families if family != "llama"]
    random.Random(seed).shuffle(others)
    return others


class Inputs:
    """Makes the models and the rows of jobs, each once."""

    def __init__(self, folder: Path, *, demo_steps: int | None = None) -> None:
        """`demo_steps` None: those of the demo's config."""
        self._folder, self._demo_steps = folder, demo_steps

    def job(self, name: str) -> Job:
        """The job of this name, with its inputs made."""
        if name == DEMO:
            return self._demo()
        if name == HOOKED:
            return Job(name=name, settings={}, loop=_LOOP)
        return self._kind(name) if name in KINDS else self._family(*name.rsplit("-", 1))

    def kept_parameters(self, family: str) -> list[str]:
        """Names of parameters that transformers keeps in fp32 in a bf16 model."""
        model = AutoModelForCausalLM.from_pretrained(self._base(family), dtype=torch.bfloat16)
        return [name for name, parameter in model.named_parameters() if parameter.dtype != torch.bfloat16]

    def _demo(self) -> Job:
        made = self._folder / "demo"
        if not made.exists():
            subprocess.run([sys.executable, make_demo.__file__, made], check=True, stdout=subprocess.DEVNULL)
        text = (ROOT / "configs" / "demo.yaml").read_text(encoding="utf-8")
        settings = yaml.safe_load(text.replace(" demo/", f" {made}/"))
        if self._demo_steps is not None:
            settings |= {"max_steps": self._demo_steps, "save_steps": self._demo_steps}
        return Job(name=DEMO, settings=settings)

    def _kind(self, name: str) -> Job:
        written = write_run(KINDS[name], self._folder / name).read_text(encoding="utf-8")
        settings = {key: value for key, value in yaml.safe_load(written).items() if key != "output_dir"}
        return Job(name=name, settings=settings, num_ranks=KINDS[name].num_ranks)

    def _family(self, family: str, dtype: str) -> Job:
        rows = self._folder / "rows.jsonl"
        base = self._base(family)
        if not rows.exists():
            rows.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in training_rows()))
        data = [{"path": str(rows), "type": "tokens"}]
        return Job(
            name=f"{family}-{dtype}",
            settings={**_SETTINGS, "base_model": str(base), "datasets": data, "dtype": dtype},
        )

    def _base(self, family: str) -> Path:
        folder = self._folder / "models" / family
        return folder if folder.exists() else save_base(family, folder)


def install_both(before: str, after: str, folder: Path) -> tuple[Revision, Revision]:
    """Install both revisions in folders of their own. One commit is installed once."""
    commits = [_git("rev-parse", "--verify", f"{name}^{{commit}}").decode().strip() for name in (before, after)]
    installed = {commit: install(commit, folder / commit) for commit in dict.fromkeys(commits)}
    return installed[commits[0]], installed[commits[1]]


def install(commit: str, folder: Path) -> Revision:
    """Check the commit out, compile it, and make an environment that has it and the packages of this environment.

    The environment finds these packages by a path. So the hook in them, by which this repository's own code is found
    (an editable installation), has no effect there, nor in processes that a run starts.
    """
    source, package, environment = folder / "source", folder / "package", folder / "environment"
    source.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", source], input=_git("archive", commit), check=True)
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", package, source], check=True)
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    own = sysconfig.get_path("purelib", "venv", {"base": str(environment)})
    Path(own, "revision.pth").write_text(f"{package}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return Revision(name=commit[:7], python=python, package=package)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", ROOT, *arguments], check=True, stdout=subprocess.PIPE).stdout


def _comparison(before: Revision, after: Revision, folder: Path) -> Callable[[Job], Row]:
    def compare(job: Job) -> Row:
        outcomes = [
            run(revision, job, folder / f"{job.name}-{number}") for number, revision in enumerate((before, after))
        ]
        return compare_outcomes(job.name, *outcomes, names=(before.name, after.name))

    return compare


def run(revision: Revision, job: Job, folder: Path) -> Outcome:
    """Run the job with the revision's own code. Raises RuntimeError if other code ran."""
    folder.mkdir(parents=True)
    config, found, printed = folder / "run.yaml", folder / "found.json", folder / "stderr.txt"
    config.write_text(yaml.safe_dump({**job.settings, "output_dir": str(folder / "out")}), encoding="utf-8")
    what = (config, str(job.num_ranks)) if job.loop is None else (job.loop, HOOKED)
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with printed.open("wb") as file:
        code = subprocess.run(
            [revision.python, "-P", _RUN, found, *what],
            cwd=folder,  # ranks are started as modules, which are looked for here first
            env={**variables, "XDG_CACHE_HOME": str(revision.package.with_name("cache"))},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            timeout=_SECONDS,
            check=False,
        ).returncode
    text = printed.read_text(encoding="utf-8", errors="replace")
    if code == 2:
        return Outcome(refusal=_error_of(text))
    if code != 0:
        return Outcome(failure=f"exit code {code}: {_error_of(text)}")
    result = json.loads(found.read_text(encoding="utf-8"))
    if not all(Path(origin).is_relative_to(revision.package) for origin in result["origins"]):
        raise RuntimeError(f"{revision.name}: other code ran: {', '.join(result['origins'])}")
    if job.loop is not None:
        return Outcome(steps=result["steps"], tensors=result["fields"], fields=result["fields"])
    tensors = tensor_hashes(folder / "out")
    return Outcome(steps=_steps(folder / "out"), tensors=tensors, fields=result.get("fields", tensors))


def _error_of(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("error:")] or text.splitlines()[-1:] or [""]
    return lines[0].removeprefix("error: ")


def _steps(output: Path) -> dict[str, str]:
    lines = map(json.loads, (output / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {f"step {line['step']}": f"{line['loss']!r} {line['grad_norm']!r}" for line in lines}


def tensor_hashes(directory: Path) -> dict[str, str]:
    """Dtype, shape and SHA-256 of each tensor of a model's directory, by name."""
    hashes = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                tensor = file.get_tensor(name)
                content = hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
                hashes[name] = f"{tensor.dtype} {list(tensor.shape)} {content}"
    return hashes


def compare_outcomes(job: str, before: Outcome, after: Outcome, *, names: tuple[str, str]) -> Row:
    """The row of a job. What the revision before refuses is left out; anything else must be the same."""
    failures = [
        f"{name} failed: {each.failure}" for name, each in zip(names, (before, after), strict=True) if each.failure
    ]
    if failures:
        return Row(job=job, differences=tuple(failures))
    if before.refusal:
        return Row(job=job, left_out=f"{names[0]} refuses it: {before.refusal}")
    if after.refusal:
        return Row(job=job, differences=(f"only {names[1]} refuses it: {after.refusal}",))
    differences = [
        f"{len(others)} of {len(ours.keys() | theirs.keys())} {what}: {_names(others)}"
        for what, ours, theirs in (
            ("steps", before.steps, after.steps),
            ("tensors", before.tensors, after.tensors),
            ("fields", before.fields, after.fields),
        )
        if (others := different(ours, theirs))
    ]
    if not before.tensors or not before.fields:
        differences.append("nothing to compare")
    return Row(
        job=job,
        num_steps=len(before.steps),
        num_tensors=len(before.tensors),
        num_fields=len(before.fields),
        differences=tuple(differences),
    )


def different(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names under which the two have not the same, or which one of them does not have."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _names(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def table_line(cells: Sequence[str]) -> str:
    """One line of a table in Markdown."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def summary(rows: Sequence[Row]) -> str:
    """How many jobs are equal, differ, and were left out."""
    num_left_out, num_other = sum(bool(row.left_out) for row in rows), sum(bool(row.differences) for row in rows)
    return (
        f"{len(rows)} jobs: {len(rows) - num_left_out - num_other} equal, {num_other} differ, {num_left_out} left out"
    )


if __name__ == "__main__":
    sys.exit(main())
