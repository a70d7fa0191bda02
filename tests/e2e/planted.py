"""A directory tree with runs in it, and files of the user's wherever a command might write."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tests.e2e.latents import save_denoiser
from tests.e2e.runs import save_base, write_config, write_rows
from tests.e2e.trained import TRAINED

Content = bytes | str | None
"""Of a file; where a link leads; None for a folder."""
NOTHING = "nothing"
"""Names that begin so are those that links lead to. There is nothing, and nothing may appear."""
NAMES = ("notes.txt", "deep/notes.txt", "model-00007-of-00009.safetensors", ".hidden")
"""The user's files in every directory."""
MORE_NAMES = (
    "README.md", "config.json", "model.safetensors", "ratel.store", "prompts.txt", "hardware.json", "curve.svg",
    "ratel.schema.json", "page.html", "class-2-0.png", "adapter_config.json", "adapter_model.safetensors",
)  # fmt: skip
"""The user's files where there are none of Ratel's with these names."""
IN_RUN = ("", "trace.json", "rejects.jsonl", "origin.json", "metrics.jsonl")
"""Names that a run may have in `run/`. One at a time is the user's, or none: a run is refused where it would write to
it. The last one is a link to a file elsewhere."""


class Tree:
    """The tree at its fixed place, and a copy of it to begin again with."""

    def __init__(self, root: Path, *, what: str = "all weights", other: str = "lora") -> None:
        """`what` and `other`: what the run trains, and what the other one trains."""
        self.work, self._copy = root / "work", root / "copy"
        self.cache, self.temporary = self.work / "cache", self.work / "tmp"
        self.models, self.mine, self.drive = self.work / "models", self.work / "mine", self.work / "drive"
        self.base = save_base(self.models / "base", num_layers=1)
        self.denoiser = save_denoiser(self.models / "dit")
        self.mine.mkdir()
        self.rows = write_rows(self.mine / "rows.jsonl")
        storage = {"engine": "threads", "paths": [str(self.drive)]}
        settings: dict[str, object] = {
            "max_steps": 2, "save_steps": 1, "save_total_limit": 2, "storage": storage, "dtype": "bfloat16",
        }  # fmt: skip
        data: dict[str, Path] = {"base": self.base, "rows": self.rows}
        self.config = write_config(self.work / "a", **data, **{**settings, **TRAINED[what]})  # type: ignore[arg-type]
        self.other = write_config(self.work / "b", **data, **{**settings, **TRAINED[other], "seed": 7})  # type: ignore[arg-type]
        for config in (self.config, self.other):
            config.succeed()
        self.run, self.other_run = self.config.output, self.other.output
        self.store = next(self.drive.glob("out-*.store"))  # of one of them; the other's is not touched either
        places = [
            self.mine, self.mine / "run", self.mine / "run" / "tokens", self.models, self.denoiser, self.drive,
            *self.drive.glob("*.store"), self.run,
            *(self.run / "run" / name for name in ("", "tokens", "tensorboard")),
            *(self.run / "run" / "tokens").glob("*"), self.cache / "ratel",
        ]  # fmt: skip
        for place in places:
            self._plant(place)
        self.temporary.mkdir()
        shutil.copytree(self.work, self._copy, symlinks=True)

    def _plant(self, place: Path) -> None:
        (place / "deep" / "empty").mkdir(parents=True, exist_ok=True)
        more = MORE_NAMES if place in (self.mine, self.models) else IN_RUN[1:] if place == self.mine / "run" else ()
        for name in (*NAMES, *more):
            (place / name).write_text(f"my {name} in {place}")
        (place / "link").symlink_to(place / "notes.txt")
        for name in ("nowhere", "nowhere.svg"):
            (place / name).symlink_to(place / f"{NOTHING}-{name}")

    def begin(self, number: int = 0) -> None:
        """Everything as it was, and the user in a folder of theirs. `number` decides about `IN_RUN`."""
        os.chdir(self.work.parent)
        shutil.rmtree(self.work)
        shutil.copytree(self._copy, self.work, symlinks=True)
        os.chdir(self.mine)
        self._in_run = IN_RUN[number % len(IN_RUN)]
        path, target = self.run / "run" / self._in_run, self.mine / "run" / self._in_run
        if self._in_run == "metrics.jsonl":
            path.replace(target)
            path.symlink_to(target)
        elif self._in_run:
            shutil.copyfile(target, path)

    def contents(self) -> dict[str, Content]:
        """Everything in the tree, by its path."""
        found: dict[str, Content] = {}
        for folder, folders, files in os.walk(self.work):
            for name in (*folders, *files):
                path = Path(folder, name)
                found[str(path)] = (
                    os.readlink(path) if path.is_symlink() else None if path.is_dir() else path.read_bytes()
                )
        return found

    def own_files(self) -> set[str]:
        """The files that are the run's own when all begins: no file of the user's, and none of the other run's."""
        own = {path for path in self.run.rglob("*") if path.is_file() and not path.is_symlink()}
        for store in self.drive.glob("*.store"):
            if str(self.run) in (store / "ratel.run").read_text():
                own |= {store / name for name in ("ratel.store", "ratel.run")}
        users = {Path(name).name for name in NAMES}
        return {str(path) for path in own if path.name not in users and path != self.run / "run" / self._in_run}
