"""A text drawn token by token, with cells under each token: one for each block, for what that block did with it.

A token is as wide as its piece, so that the text reads as text.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib import collections, font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, FAINT = "#222222", "#767676", "#d6d6d6"
TITLE = dict(fontsize=11, fontweight="bold")
VISIBLE = {" ": "·", "\n": "↵", "\t": "→", "\r": "↵"}
TEXT_HEIGHT = 1.25  # in rows of cells
ROW = 0.14  # inches
LEFT, RIGHT, HEADER, FOOTER = 0.72, 0.55, 0.62, 0.22  # inches


class TextMap:
    """The layout: call `write`, then `add_cell` for each token and block, then `finish`; `fig` is the figure.

    `columns`: characters per line; default 64 for single characters, 96 for longer pieces.
    """

    def __init__(self, pieces: Sequence[str], num_blocks: int, title: str, columns: int | None = None):
        single = all(len(piece) <= 1 for piece in pieces)
        self._columns = columns or (64 if single else 96)
        self._pieces = [visible(piece)[: self._columns] for piece in pieces]
        self._line_T, self._start_T = wrap([len(piece) for piece in self._pieces], self._columns)
        self._num_lines = int(self._line_T[-1]) + 1 if self._pieces else 0
        self._line_height = 2 + num_blocks  # the rest of the 2 is the gap below
        pitch = 0.12 if single else 0.0867  # inches per character: whole pixels at the resolution of `plots.save`
        self._width = LEFT + self._columns * pitch + RIGHT
        self._height = HEADER + self._num_lines * self._line_height * ROW + FOOTER
        self.fig = Figure(figsize=(self._width, self._height), layout="none")
        inside = LEFT / self._width, FOOTER / self._height, self._columns * pitch / self._width
        self._ax = self.fig.add_axes((*inside, 1 - (HEADER + FOOTER) / self._height))
        self._ax.set(xlim=(0, self._columns), ylim=(self._num_lines * self._line_height, 0))
        self._ax.axis("off")
        self._boxes, self._fills, self._edges = [], [], []
        self.fig.text(0.1 / self._width, 1 - 0.12 / self._height, title, va="top", **TITLE)

    def write(self, about: str, is_quiet_T: np.ndarray) -> None:
        """The text, grey where `is_quiet_T`, and a line below the title that says what the cells mean."""
        for t, piece in enumerate(self._pieces):
            y = self._line_T[t] * self._line_height + TEXT_HEIGHT / 2
            for i, character in enumerate(piece):
                quiet = character in VISIBLE.values() or is_quiet_T[t]
                style = dict(
                    family="DejaVu Sans Mono", fontsize=9.5, color="#a3a3a3" if quiet else INK, parse_math=False
                )
                self._ax.text(self._start_T[t] + i + 0.5, y, character, ha="center", va="center", **style)
        self.fig.text(0.1 / self._width, 1 - 0.34 / self._height, about, va="top", color=MUTED)

    def add_cell(self, t: int, block: int, fill, *, is_box: bool, edge="none", part: tuple[int, int] = (0, 1)) -> None:
        """A box, or a line, under token t. `part` = (i, n): the i-th of n parts of its width."""
        first, last = self._start_T[t] + 0.07, self._start_T[t] + len(self._pieces[t]) - 0.07
        step = (last - first) / part[1]
        x0, x1 = first + part[0] * step, first + (part[0] + 1) * step
        y = self._line_T[t] * self._line_height + TEXT_HEIGHT + block + 0.5
        half = 0.43 if is_box else 0.055
        self._boxes.append([(x0, y - half), (x1, y - half), (x1, y + half), (x0, y + half)])
        self._fills.append(fill)
        self._edges.append(edge)

    def finish(self, names: Sequence[str], totals: Sequence[str]) -> None:
        """Draws the cells; the name of each block stands at the left of every line, its total at the right of the
        first."""
        widths = [0.0 if edge == "none" else 0.8 for edge in self._edges]
        cells = collections.PolyCollection(
            self._boxes, facecolors=self._fills, edgecolors=self._edges, linewidths=widths or 0
        )
        self._ax.add_collection(cells)
        small = dict(va="center", fontsize=7.5, color=MUTED)
        for line in range(self._num_lines):
            for block, (name, total) in enumerate(zip(names, totals, strict=True)):
                y = line * self._line_height + TEXT_HEIGHT + block + 0.5
                self._ax.text(-0.8, y, name, ha="right", **small)
                if line == 0:
                    self._ax.text(self._columns + 0.8, y, total, ha="left", **small)

    def header_axes(self, inches: float) -> Axes:
        """Axes for a scale in the upper right corner, this wide."""
        place = 1 - (RIGHT + inches) / self._width, 1 - 0.25 / self._height, inches / self._width, 0.09 / self._height
        return self.fig.add_axes(place)


def visible(piece: str) -> str:
    """The piece with white space shown, and characters that the font lacks as a box."""
    known = font_manager.get_font(font_manager.findfont("DejaVu Sans Mono")).get_char_index
    shown = (VISIBLE.get(character, character) for character in piece)
    return "".join(c if c.isprintable() and known(ord(c)) else "□" for c in shown) or "□"


def wrap(widths: Sequence[int], columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Line and first column of each token, filling lines of `columns` characters without splitting a token."""
    lines, starts, line, start = [], [], 0, 0
    for width in widths:
        if start + width > columns:
            line, start = line + 1, 0
        lines.append(line)
        starts.append(start)
        start += width
    return np.array(lines), np.array(starts)
