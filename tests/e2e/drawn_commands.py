"""Random command lines about the run of a `planted.Tree`, which name everything in it. None of them insists.

A command that writes is about the run, or about one at a new place; one that only reads is about any run or model.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

from typer import Typer
from typer.main import get_command

from ratel_cli.cli.app import app
from tests.e2e.planted import Tree

NUM_COMMANDS = 5
"""In a sequence."""
_WEIGHTS = {"finetune": 6, "export": 5, "clean": 3, "init": 3, "plan": 4, "report": 3}
"""How often a command is drawn; the others count 2."""
_PARTS = {"--gpu": "rtx4090", "--ram": "64GB", "--ssd": "2x990pro"}
"""Of another machine, by option."""


@functools.cache
def commands_of(program: Typer = app) -> dict[str, list[tuple[str, ...]]]:
    """The program's commands, each with its options: their names."""
    commands = get_command(program).commands  # type: ignore[attr-defined]
    return {
        name: [tuple(each.opts) for each in command.params if each.param_type_name == "option"]
        for name, command in commands.items()
    }


def draw_sequence(number: int, tree: Tree) -> list[list[str]]:
    """The command lines of a sequence."""
    draw = random.Random(number)
    names = sorted(commands_of())
    weights = [_WEIGHTS.get(name, 2) for name in names]
    return [[name, *_ARGUMENTS[name](_Draw(draw, tree))] for name in draw.choices(names, weights, k=NUM_COMMANDS)]


class _Draw:
    """Parts of one command line. Those that several options share are drawn once."""

    def __init__(self, draw: random.Random, tree: Tree) -> None:
        self._draw = draw
        self.tree = tree
        new = tree.work / "NEW"
        self.place = draw.choice([tree.run, tree.mine, tree.base, tree.models, new, new, tree.other_run, tree.drive])
        """Where to write, or what to look at."""
        self.run = draw.choice([tree.config, tree.config, tree.run, tree.run, new])
        self.model = draw.choice([self.run, self.run, tree.base, tree.other, tree.other_run, self.place])
        """A run or a model that is only read."""
        self.file = draw.choice(
            [tree.mine / "notes.txt", tree.mine / "new", tree.mine / "link", tree.models / "nowhere", tree.config]
        )
        """The file to write."""
        self.step = self.one_of([], ["--step", 1], ["--step", 2], ["--step", 9])
        self.json = self.maybe("--json")

    def one_of(self, *choices: Sequence[object]) -> list[str]:
        return [str(each) for each in self._draw.choice(choices)]

    def maybe(self, *arguments: object) -> list[str]:
        return self.one_of([], arguments)

    def changes(self) -> list[str]:
        output = [f"output_dir={self.place}"]
        return self.one_of([], [], ["learning_rate=0.5"], ["seed=3"], ["sequence_len=32"], output, output)

    def paths(self) -> list[str]:
        work, places = self.tree.work, [self.tree.mine, self.tree.drive, self.tree.store]
        paths = self._draw.choice([*places, work / "NEW2"])
        snapshot = self._draw.choice([*places, work / "NEW3"])
        setting = [f"storage.snapshot={{path: {snapshot}, every: 1}}"]
        return self.one_of([], [], [], [], [f"storage.paths=[{paths}]"], setting)


def _finetune(draw: _Draw) -> list[str]:
    tree, number = draw.tree, draw.one_of([""], ["@1"], ["@1"], ["@2"], ["@9"])[0]
    (origin,) = draw.one_of([tree.run], [tree.config], [tree.other_run])
    start = ["--from", f"{origin}{number}", "max_steps=3", f"output_dir={draw.place}", *draw.maybe("--fresh-optimizer")]
    changes = draw.one_of(draw.changes(), draw.changes(), start)
    resume = draw.one_of([], [], ["--resume", "no"], ["--resume", 1], ["--dry-run"])
    ranks = draw.maybe("--ranks", 1)
    return [str(tree.config), *changes, *draw.paths(), *resume, *ranks, *_records(draw)]


def _records(draw: _Draw) -> list[str]:
    """Files that a run writes only if it is asked to."""
    return draw.one_of(*[[]] * 6, ["trace=true"], ["report_to=[tensorboard]"])


def _init(draw: _Draw) -> list[str]:
    return [str(draw.tree.base), *draw.maybe("--data", draw.tree.rows), *draw.maybe("-o", draw.file)]


def _check(draw: _Draw) -> list[str]:
    return [str(draw.model), *draw.changes(), *draw.paths(), *draw.json]


def _profile(draw: _Draw) -> list[str]:
    output = draw.one_of([], ["-o", draw.file], ["-o", draw.file], ["-o", draw.place / "hardware.json"])
    storage, refresh = draw.maybe("--storage", draw.place), draw.maybe("--refresh")
    return [*draw.maybe(draw.run), *output, *storage, *refresh, *draw.json]


def _plan(draw: _Draw) -> list[str]:
    mine, models = draw.tree.mine, draw.tree.models
    drawn = [mine / "curve.svg", models / "curve.svg", models / "nowhere.svg", mine / "new.png", draw.place / "new.svg"]
    picture = draw.maybe("--plot", *draw.one_of(*([each] for each in drawn)))
    parts = [each for option, part in _PARTS.items() for each in draw.maybe(option, part)]
    hardware = draw.one_of([], parts, ["--hardware", draw.tree.run / "run" / "hardware.json"])
    asked = draw.one_of([], [], ["--prices"], ["--prices"], ["--direct"], ["--rok"])
    asked = [*draw.maybe("--compare"), *draw.maybe("--largest"), *asked]
    several = ["--ranks", "4", "--nodes", "2", "--network", "1GB/s"]
    asked = draw.one_of(asked, asked, ["--ranks", "3"], several)
    return [str(draw.run), *draw.one_of([], draw.changes()), *hardware, *picture, *asked, *draw.json]


def _explain(draw: _Draw) -> list[str]:
    return [*draw.one_of(["storage.paths"], ["output_dir"], ["nonsense"]), *draw.one_of([], ["--json"])]


def _schema(draw: _Draw) -> list[str]:
    return draw.one_of([], ["-o", draw.file], ["-o", draw.place / "ratel.schema.json"])


def _import(draw: _Draw) -> list[str]:
    tree = draw.tree
    return [*draw.one_of([tree.config], [tree.mine / "config.json"]), *draw.maybe("-o", draw.file), *draw.json]


def _export(draw: _Draw) -> list[str]:
    return [str(draw.run), *draw.step, "-o", str(draw.place)]


def _merge(draw: _Draw) -> list[str]:
    return [*_export(draw), *draw.one_of([], ["--base", "dequantised"], ["--base", "original"])]


def _verify(draw: _Draw) -> list[str]:
    return [str(draw.model), *draw.json]


def _eval(draw: _Draw) -> list[str]:
    mine = draw.tree.mine
    data = draw.one_of([draw.tree.rows], [draw.tree.rows], [mine], [mine / "notes.txt"])
    return [str(draw.model), *data, *draw.one_of([], draw.changes()), *draw.step, *draw.json]


def _generate(draw: _Draw) -> list[str]:
    if draw.maybe("images"):
        return _images(draw)
    prompts = draw.one_of(["What?"], ["What?", "And?"], ["--prompts", draw.tree.mine / "prompts.txt"])
    texts = [*prompts, *draw.maybe("--temperature", 1), *draw.one_of(["--raw"], ["--raw"], []), *draw.json]
    model = draw.one_of(*[[draw.model]] * 9, [draw.tree.denoiser])
    return [*model, *draw.one_of([], draw.changes()), *texts, "--max-new-tokens", "2", *draw.step]


def _images(draw: _Draw) -> list[str]:
    model = draw.one_of(*[[draw.tree.denoiser]] * 3, [draw.model])
    classes = draw.one_of(["--class", 1], ["--class", 1], ["--class", 2], ["--class", 1, "--class", 2])
    step = draw.one_of([], [], [], draw.step)  # which only a run has
    options = [*draw.maybe("--guidance", 2), "--denoising-steps", "1", *classes, *step]
    return [*model, *draw.one_of([], draw.changes()), *options, "-o", str(draw.place)]


def _restore(draw: _Draw) -> list[str]:
    tree = draw.tree
    (snapshot,) = draw.one_of([tree.mine], [tree.drive], [tree.store])
    return [str(draw.run), *draw.paths(), *draw.maybe("--from", snapshot)]


def _data(draw: _Draw) -> list[str]:
    shown = [*draw.maybe("-n", 1), *draw.maybe("--bad"), *draw.json]
    return [str(draw.model), *draw.changes(), *draw.paths(), *shown]


def _clean(draw: _Draw) -> list[str]:
    return [str(draw.run), *draw.one_of([], ["--yes"], ["--yes", "--store"], ["--yes", "--output"])]


def _status(draw: _Draw) -> list[str]:
    return [*draw.one_of([], [draw.tree.work], [draw.model]), *draw.json]


def _report(draw: _Draw) -> list[str]:
    names = ("README.md", "notes.txt", "link", "nowhere", "page.html", "run/report.html")
    (name,) = draw.one_of(*([each] for each in names))
    return [str(draw.run), *draw.maybe("--terminal"), *draw.maybe("-o", draw.place / name)]


def _machine(draw: _Draw) -> list[str]:
    return [*draw.one_of([], [draw.model], [draw.place, draw.run]), *draw.json]


def _bench(draw: _Draw) -> list[str]:
    """Into a place that is not there: training takes minutes."""
    sizes = draw.maybe("--size", "tiny")
    return ["--storage", str(draw.place / "nowhere"), *sizes, *draw.maybe("--seconds", "1"), *draw.json]


def _demo(_draw: _Draw) -> list[str]:
    """Into a place that is taken: training takes minutes."""
    return ["--keep", __file__]


_ARGUMENTS: dict[str, Callable[[_Draw], list[str]]] = {
    "bench": _bench,
    "check": _check,
    "clean": _clean,
    "data": _data,
    "demo": _demo,
    "doctor": _machine,
    "env": _machine,
    "eval": _eval,
    "explain": _explain,
    "export": _export,
    "finetune": _finetune,
    "generate": _generate,
    "import": _import,
    "init": _init,
    "merge": _merge,
    "plan": _plan,
    "profile": _profile,
    "report": _report,
    "restore": _restore,
    "schema": _schema,
    "status": _status,
    "verify": _verify,
}
"""What each command may be asked to do. A new command needs its line."""
