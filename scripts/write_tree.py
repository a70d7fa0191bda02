"""Writes the tree in docs/architecture.md: all files, each with the first sentence of its docstring.

    python -m scripts.write_tree

`tests/test_docs.py` fails while the tree differs from what this module would write. Only what is no Python has its
words here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
COMMAND = "python -m scripts.write_tree"
_TREE = re.compile(r"(?<=```text\n)ratel_cli/.*?(?=```)", re.DOTALL)
_WIDTH = 30
"""Of the column with the names."""
_OTHERS = (
    ("  bench/", "benchmarks and results/"),
    ("kernels/", "C++: update rules, one body for every instruction set; checksums, NF4, copies, io_uring"),
    ("configs/", "the demo, a 1.1B shape; hardware/ and models/ of the papers"),
    ("docs/", "these documents; guide/ has the pages of guide.md"),
    ("examples/", "programs to run and read; the first compares a run with transformers' Trainer"),
    ("tests/", "as ratel_cli; e2e/ inputs/ simulated_gpu/ stress/; reference.py is the oracle"),
)


def written_tree(document: str) -> str:
    """The document with the tree of the files that are there."""
    lines = [
        *_lines(ROOT / "ratel_cli", 0),
        *_lines(ROOT / "scripts", 0, folder_words="programs that are not installed"),
    ]
    lines += [f"{name:{_WIDTH}}{words}" for name, words in _OTHERS]
    [_] = _TREE.findall(document)
    return _TREE.sub(lambda _: "".join(f"{line}\n" for line in lines), document)


def _lines(folder: Path, depth: int, *, folder_words: str = "") -> Iterator[str]:
    """A folder and what is in it: its own files, then the folders with Python files."""
    yield _line(f"{folder.name}/", folder_words or _first_sentence(folder / "__init__.py"), depth)
    files = sorted([*folder.glob("*.py"), *folder.glob("*.pyi")])
    yield from (_line(file.name, _first_sentence(file), depth + 1) for file in files if file.name != "__init__.py")
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and (inner / "__init__.py").exists():
            yield from _lines(inner, depth + 1)


def _line(name: str, words: str, depth: int) -> str:
    indented = f"{2 * depth * ' '}{name}"
    return f"{indented:{_WIDTH}}{words}" if words else indented


def _first_sentence(file: Path) -> str:
    """Of the docstring, without its full stop."""
    if not file.exists():
        return ""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", paragraph)[0].removesuffix(".")


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(written_tree(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
