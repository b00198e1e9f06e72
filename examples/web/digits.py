"""Hand-drawn digits without a download: strokes, tilted, stretched and blurred by chance."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

SIZE = 16  # pixels a side


def _arc(x: float, y: float, width: float, height: float, start: float, end: float) -> list[tuple[float, float]]:
    """Points on an ellipse around (x, y); degrees, clockwise from the right, as y runs downward."""
    angles = np.radians(np.linspace(start, end, 9))
    return [(x + width * float(np.cos(a)), y + height * float(np.sin(a))) for a in angles]


# The strokes of each digit in a square of side 1.
STROKES: list[list[list[tuple[float, float]]]] = [
    [_arc(0.5, 0.5, 0.24, 0.36, 0, 360)],
    [[(0.36, 0.28), (0.54, 0.14), (0.54, 0.86)]],
    [[*_arc(0.5, 0.34, 0.22, 0.2, 190, 390), (0.28, 0.85), (0.74, 0.85)]],
    [_arc(0.46, 0.32, 0.22, 0.18, 200, 450), _arc(0.46, 0.68, 0.25, 0.18, 270, 520)],
    [[(0.58, 0.14), (0.24, 0.62), (0.78, 0.62)], [(0.62, 0.4), (0.62, 0.88)]],
    [[(0.72, 0.15), (0.34, 0.15), (0.31, 0.46), *_arc(0.48, 0.63, 0.24, 0.22, 240, 500)]],
    [[(0.62, 0.13), (0.36, 0.42), (0.27, 0.62)], _arc(0.5, 0.65, 0.23, 0.21, 0, 360)],
    [[(0.25, 0.15), (0.75, 0.15), (0.43, 0.87)]],
    [_arc(0.5, 0.31, 0.19, 0.17, 0, 360), _arc(0.5, 0.67, 0.24, 0.19, 0, 360)],
    [_arc(0.5, 0.35, 0.22, 0.2, 0, 360), [(0.72, 0.35), (0.68, 0.6), (0.55, 0.87)]],
]


def _draw(digit: int, random: np.random.Generator) -> np.ndarray:
    """One image, (SIZE, SIZE) float64 from 0 to 1."""
    angle, shear = random.normal(0, 0.16), random.normal(0, 0.16)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    form = turn @ np.array([[1, shear], [0, 1]]) @ np.diag(random.uniform(0.72, 1.08, 2))
    shift, thickness = 0.5 + random.normal(0, 0.045, 2), random.uniform(0.025, 0.065)
    centres = (np.indices((SIZE, SIZE))[::-1].reshape(2, -1).T + 0.5) / SIZE
    distance = np.full(SIZE * SIZE, np.inf)
    for stroke in STROKES[digit]:
        points = (np.array(stroke) - 0.5 + random.normal(0, 0.014, (len(stroke), 2))) @ form.T + shift
        for a, b in pairwise(points):
            along = np.clip((centres - a) @ (b - a) / ((b - a) @ (b - a) + 1e-9), 0, 1)
            distance = np.minimum(distance, np.linalg.norm(centres - a - along[:, None] * (b - a), axis=1))
    ink = np.clip(1 - (distance - thickness) * SIZE, 0, 1) * random.uniform(0.75, 1)
    return np.clip(ink + random.normal(0, 0.04, ink.shape), 0, 1).reshape(SIZE, SIZE)


def draw(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, (count, SIZE, SIZE) and (count,), both uint8; every digit equally often, in random order."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % 10)
    images = np.stack([_draw(int(digit), random) for digit in labels])
    return (np.round(images * 15) * 17).astype(np.uint8), labels.astype(np.uint8)  # 16 shades: half the size when compressed
