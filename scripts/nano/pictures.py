"""Pictures of simple shapes on a grid of cells, and questions about them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CELL = 40  # pixels; one image token
MAX_CELLS = 6
GRIDS = ((1, 2), (2, 1), (2, 2), (2, 3), (3, 2))  # rows, columns
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 180),
    "orange": (245, 140, 30),
    "black": (25, 25, 25),
    "pink": (250, 150, 190),
}
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
QUESTIONS = ("where", "colour", "shape", "count", "presence", "what")
EVEN = (0.125, 0.125, 0.125, 0.125, 0.125, 0.375)  # "what" also stands in for what cannot be asked
_EMPTY_SHARE = 0.12


class Picture(NamedTuple):
    """cells: (colour, shape) or None per cell, in raster order. pixels: uint8 [40 r, 40 c, 3]."""

    rows: int
    columns: int
    cells: list[tuple[str, str] | None]
    pixels: np.ndarray

    @property
    def tiles(self) -> np.ndarray:
        """uint8 [rows · columns, 40, 40, 3]."""
        split = self.pixels.reshape(self.rows, CELL, self.columns, CELL, 3)
        return split.swapaxes(1, 2).reshape(-1, CELL, CELL, 3)


def draw(rng: np.random.Generator) -> Picture:
    """Draws a random picture."""
    rows, columns = GRIDS[rng.integers(len(GRIDS))]
    background = 255 - rng.integers(0, 40) - rng.integers(0, 8, 3)
    pixels = np.empty((rows * CELL, columns * CELL, 3))
    pixels[:] = background
    cells = []
    for cell in range(rows * columns):
        if rng.random() < _EMPTY_SHARE:
            cells.append(None)
            continue
        colour, shape = _random_cell(rng)
        radius = rng.uniform(10, 16)
        middle = CELL / 2 + rng.uniform(-3.5, 3.5, 2)
        ink = np.array(COLOURS[colour]) + rng.integers(-12, 13, 3)
        row, column = divmod(cell, columns)
        part = pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        part[_mask(shape, middle, radius)] = ink
        cells.append((colour, shape))
    pixels += rng.integers(-4, 5, pixels.shape)
    return Picture(rows, columns, cells, pixels.clip(0, 255).astype(np.uint8))


def _random_cell(rng: np.random.Generator) -> tuple[str, str]:
    return list(COLOURS)[rng.integers(len(COLOURS))], SHAPES[rng.integers(len(SHAPES))]


def _mask(shape: str, middle: np.ndarray, radius: float) -> np.ndarray:
    y, x = (np.indices((CELL, CELL)) + 0.5 - middle[:, None, None]) / radius
    distance = np.hypot(x, y)
    match shape:
        case "circle":
            return distance <= 1
        case "ring":
            return (distance <= 1) & (distance >= 0.55)
        case "square":
            return np.maximum(abs(x), abs(y)) <= 0.88
        case "diamond":
            return abs(x) + abs(y) <= 1.15
        case "cross":
            return (np.minimum(abs(x), abs(y)) <= 0.28) & (np.maximum(abs(x), abs(y)) <= 1)
        case _:
            return (y <= 0.8) & (abs(x) <= (y + 1) * 0.58)


def question(
    rng: np.random.Generator, picture: Picture, shares: Sequence[float] = EVEN
) -> tuple[str, str]:
    """Returns a question about the picture, of a kind drawn by `shares`, and its answer."""
    at = int(rng.integers(len(picture.cells)))
    cell, where = picture.cells[at], place(picture, at)
    kind = QUESTIONS[rng.choice(len(QUESTIONS), p=shares)]
    if kind == "where" and cell and picture.cells.count(cell) == 1:
        return f"Where is the {' '.join(cell)}?", f"At the {where}."
    if kind == "colour" and cell:
        return f"Which colour is the shape at the {where}?", f"{cell[0].capitalize()}."
    if kind == "shape" and cell:
        return f"Which shape is at the {where}?", f"A {cell[1]}."
    if kind == "count":
        shape = SHAPES[rng.integers(len(SHAPES))]
        count = sum(c is not None and c[1] == shape for c in picture.cells)
        plural = "crosses" if shape == "cross" else f"{shape}s"
        return f"How many {plural} are there?", f"{count}."
    if kind == "presence":
        colour, shape = _random_cell(rng) if cell is None or rng.random() < 0.5 else cell
        yes = (colour, shape) in picture.cells
        return f"Is there {_article(colour)} {shape}?", "Yes." if yes else "No."
    return f"What is at the {where}?", describe(cell) + "."


def describe(cell: tuple[str, str] | None) -> str:
    """Returns "A red circle" or "Nothing"."""
    return f"{_article(cell[0]).capitalize()} {cell[1]}" if cell else "Nothing"


def describe_all(picture: Picture) -> str:
    """Returns one sentence per cell, in raster order."""
    places = (place(picture, i).capitalize() for i in range(len(picture.cells)))
    pairs = zip(places, picture.cells, strict=True)
    return " ".join(f"{where}: {describe(cell).lower()}." for where, cell in pairs)


def _article(colour: str) -> str:
    return f"an {colour}" if colour[0] in "aeiou" else f"a {colour}"


def place(picture: Picture, cell: int) -> str:
    """Returns where a cell is, "top left" say."""
    row, column = divmod(cell, picture.columns)
    vertical = {1: [""], 2: ["top", "bottom"], 3: ["top", "middle", "bottom"]}[picture.rows][row]
    horizontal = {1: [""], 2: ["left", "right"], 3: ["left", "middle", "right"]}
    return f"{vertical} {horizontal[picture.columns][column]}".strip()
