"""Counts the statements of ratel_cli by folder, docstrings left out, and holds them against what is allowed.

    python -m scripts.statements

Prints each folder's count and what `scripts/statements.txt` allows, and ends with exit code 1 if one has more. A change
that needs more raises its line there in the same commit, with the reason behind a `#`; one that leaves fewer lowers it.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOWED = ROOT / "scripts" / "statements.txt"


def counted(package: Path) -> Counter[str]:
    """Statements by folder of the package; its own files are under `.`."""
    found = Counter[str]()
    for path in package.rglob("*.py"):
        folders = path.relative_to(package).parts[:-1]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[folders[0] if folders else "."] += sum(map(_counts, ast.walk(tree)))
    return found


def read_allowed(text: str) -> dict[str, int]:
    """Statements by folder, of lines `folder number`; behind a `#` is why. Raises ValueError."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return {folder: int(number) for folder, number in filter(None, lines)}


def over(found: Counter[str], allowed: dict[str, int]) -> dict[str, int]:
    """By folder, how many statements it has more than are allowed; a folder without a line may have none."""
    return {folder: more for folder in found if (more := found[folder] - allowed.get(folder, 0)) > 0}


def _counts(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.stmt) and not is_text


def main() -> int:
    """Print the table. Returns the exit code."""
    found, allowed = counted(ROOT / "ratel_cli"), read_allowed(ALLOWED.read_text(encoding="utf-8"))
    for folder in sorted({*found, *allowed}):
        print(f"{folder:<12}{found[folder]:>7,}{allowed.get(folder, 0):>9,}")
    print(f"{'all':<12}{found.total():>7,}{sum(allowed.values()):>9,}")
    more = over(found, allowed)
    for folder, number in more.items():
        print(f"{folder} has {number} statements more than {ALLOWED.relative_to(ROOT)} allows", file=sys.stderr)
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
