"""A small terminal: what a person would see after these characters were written.

It knows the few control sequences that our programs send and refuses all others. Like the terminals of today it wraps
a line when the next character would not fit, and wraps or joins what it shows when it becomes narrower or wider.
"""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])")


class Screen:
    """`columns` by `rows` characters, and what has scrolled away above them."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._lines: list[str] = [""]
        """Of everything that was shown, from the first line on."""
        self._goes_on: set[int] = set()
        """Lines that were wrapped: the text goes on in the next one."""
        self._row, self._column = 0, 0
        self._rest = ""
        """The beginning of a control sequence whose end is still to come."""

    @property
    def lines(self) -> list[str]:
        """Everything that was shown, also what has scrolled away, without empty lines at the end."""
        lines = [line.rstrip() for line in self._lines]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def num_wrapped(self) -> int:
        """How many lines were too long."""
        return len(self._goes_on)

    @property
    def cursor(self) -> tuple[int, int]:
        """Its row, among all lines, and its column."""
        return self._row, self._column

    def write(self, text: str) -> None:
        """Show text, control sequences included."""
        text, self._rest = self._rest + text, ""
        position = 0
        while position < len(text):
            char = text[position]
            if char == "\x1b":
                match = _SEQUENCE.match(text, position)
                if match is None:
                    assert len(text) - position < 16, f"not a known sequence: {text[position : position + 16]!r}"
                    self._rest = text[position:]
                    return
                self._obey(match[1], match[2])
                position = match.end()
                continue
            if char == "\r":
                self._column = 0
            elif char == "\n":
                self._column = 0
                self._down()
            else:
                assert char.isprintable(), repr(char)
                self._put(char)
            position += 1

    def resize(self, columns: int) -> None:
        """Wrap and join what is shown, as for a person who makes the window narrower or wider."""
        texts: list[str] = [""]
        cursor = (0, 0)
        for row, line in enumerate(self._lines):
            if row == self._row:
                cursor = (len(texts) - 1, len(texts[-1]) + self._column)
            texts[-1] += line
            if row not in self._goes_on and row + 1 < len(self._lines):
                texts.append("")
        self._lines, self._goes_on = [], set()
        for number, text in enumerate(texts):
            parts = [text[start : start + columns] for start in range(0, len(text), columns)] or [""]
            if number == cursor[0]:
                self._row = len(self._lines) + min(cursor[1] // columns, len(parts) - 1)
                self._column = cursor[1] % columns
            self._goes_on |= {len(self._lines) + part for part in range(len(parts) - 1)}
            self._lines += parts
        self.columns = columns

    def _obey(self, numbers: str, command: str) -> None:
        if command == "m" or (numbers == "?25" and command in "hl"):
            return
        if command == "A":
            top = max(0, len(self._lines) - self.rows)
            self._row = max(top, self._row - int(numbers or 1))
        elif command == "K" and numbers in ("", "0", "2"):
            self._cut(0 if numbers == "2" else self._column)
        else:  # nor J: a terminal may keep what it erases, as tmux does
            raise AssertionError(f"not a known sequence: {numbers}{command}")

    def _cut(self, column: int) -> None:
        self._lines[self._row] = self._lines[self._row][:column]
        self._goes_on.discard(self._row)
        if not column:
            self._goes_on.discard(self._row - 1)

    def _put(self, char: str) -> None:
        if self._column == self.columns:
            self._goes_on.add(self._row)
            self._column = 0
            self._down()
        line = self._lines[self._row].ljust(self._column)
        self._lines[self._row] = line[: self._column] + char + line[self._column + 1 :]
        self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._lines):
            self._lines.append("")
