"""As much of a terminal as the counters need: what a user would see."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|\x1b([78D])|([\s\S])")


class Screen:
    """Anything that it does not know is an error."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.margins = (0, rows - 1)
        self.gone: list[str] = []
        """What has scrolled out at the top."""
        self._saved = (0, 0)

    def text(self) -> list[str]:
        """Rows from the top, without trailing blanks."""
        return ["".join(line).rstrip() for line in self.lines]

    def feed(self, data: str) -> None:
        for numbers, command, escape, character in _PIECE.findall(data):
            if command:
                self._command(command, [int(number) for number in numbers.split(";") if number])
            elif escape:
                self._escape(escape)
            else:
                self._put(character)

    def _command(self, command: str, numbers: list[int]) -> None:
        match command, numbers:
            case "r", []:
                self.margins, self.row, self.column = (0, self.rows - 1), 0, 0
            case "r", [top, bottom]:
                self.margins, self.row, self.column = (top - 1, bottom - 1), 0, 0
            case "H", [row, column]:
                self.row, self.column = row - 1, column - 1
            case "A", []:
                self.row = max(self.row - 1, 0)
            case "K", [] | [2]:
                start = self.column if not numbers else 0
                self.lines[self.row][start:] = [" "] * (self.columns - start)
            case _:
                raise AssertionError(f"unknown: CSI {numbers} {command}")

    def _escape(self, escape: str) -> None:
        if escape == "7":
            self._saved = self.row, self.column
        elif escape == "8":
            self.row, self.column = self._saved
        else:
            self._down()

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.column = 0  # as a terminal driver makes it CR LF
            self._down()
        else:
            if self.column == self.columns:
                self.column = 0
                self._down()
            self.lines[self.row][self.column] = character
            self.column += 1

    def _down(self) -> None:
        top, bottom = self.margins
        if self.row != bottom:
            self.row = min(self.row + 1, self.rows - 1)
            return
        line = self.lines.pop(top)
        if top == 0:
            self.gone.append("".join(line).rstrip())
        self.lines.insert(bottom, [" "] * self.columns)
