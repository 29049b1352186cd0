"""Calibration of a drafter's confidences: sequential temperature scaling."""

import numpy as np

GRID = np.geomspace(0.25, 4.0, 97)
BINS = 10


def temperatures(
    confidence: np.ndarray, accept: np.ndarray, counts: np.ndarray
) -> tuple[list[float], np.ndarray]:
    """Fits one temperature per draft, each given those before it.

    Args:
      confidence, accept: [N, n], of a drafter without temperatures: what it says and what holds.
      counts: [N, n], which of them exist.

    Returns:
      The temperatures, and the calibrated confidences. Each temperature brings the survival of the
      prefix that ends there closest to the truth.
    """
    score = np.log(np.clip(confidence, 1e-6, 1 - 1e-6)) - np.log1p(
        -np.clip(confidence, 1e-6, 1 - 1e-6)
    )
    truth = np.cumprod(accept, axis=1)
    found, scaled, so_far = [], [], np.ones(len(score))
    for j in range(score.shape[1]):
        here = counts[:, j]
        options = 1 / (1 + np.exp(-score[:, j, None] / GRID))
        errors = [
            calibration_error((so_far * options[:, i])[here], truth[here, j])
            for i in range(len(GRID))
        ]
        best = int(np.argmin(errors))
        found.append(round(float(GRID[best]), 4))
        scaled.append(options[:, best])
        so_far = so_far * scaled[-1]
    return found, np.stack(scaled, axis=1)


def calibration_error(said: np.ndarray, truth: np.ndarray) -> float:
    """Returns the mean gap between what is said and what holds, in bins of what is said."""
    if not len(said):
        return 0.0
    return sum(n * abs(a - b) for a, b, n in reliability(said, truth)) / len(said)


def reliability(said: np.ndarray, truth: np.ndarray) -> list[tuple[float, float, int]]:
    """Returns (mean said, mean truth, count) of each bin that holds anything."""
    place = np.minimum((said * BINS).astype(int), BINS - 1)
    groups = [place == i for i in range(BINS)]
    return [
        (float(said[g].mean()), float(truth[g].mean()), int(g.sum())) for g in groups if g.any()
    ]
