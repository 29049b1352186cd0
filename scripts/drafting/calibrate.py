"""Calibration of a drafter's confidences: sequential temperature scaling."""

from pathlib import Path
from typing import Any

import numpy as np

GRID = np.geomspace(0.25, 4.0, 97)
BINS = 10


def assess(confidence: np.ndarray, accept: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """Fits temperatures on the first half of some blocks and measures them on the other.

    Args:
      confidence, accept, counts: as `temperatures` takes them.

    Returns:
      temperatures; accept, by position, and length, tokens a round, of whole blocks; before and
      after scaling: error and reliability of the survival that was said.
    """
    half = len(confidence) // 2
    fitted = temperatures(confidence[:half], accept[:half], counts[:half])
    whole = counts[half:, -1]
    accept, confidence = accept[half:][whole], confidence[half:][whole]
    truth = np.cumprod(accept, axis=1)
    result: dict[str, Any] = {
        "temperatures": fitted,
        "accept": np.round(accept.mean(axis=0), 4).tolist(),
        "length": round(float(1 + truth.sum(axis=1).mean()), 3),
    }
    scaled = 1 / (1 + np.exp(-_logits(confidence) / np.array(fitted)))
    for name, said in (("before", confidence), ("after", scaled)):
        survival = np.cumprod(said, axis=1).ravel()
        result[name] = {
            "error": round(calibration_error(survival, truth.ravel()), 4),
            "reliability": reliability(survival, truth.ravel()),
        }
    return result


def temperatures(confidence: np.ndarray, accept: np.ndarray, counts: np.ndarray) -> list[float]:
    """Fits one temperature per draft, each given those before it.

    Args:
      confidence, accept: [N, n], of a drafter without temperatures: what it says and what holds.
      counts: [N, n], which of them exist.

    Returns:
      The temperatures; each brings the survival of the prefix that ends there closest to the truth.
    """
    score, truth = _logits(confidence), np.cumprod(accept, axis=1)
    found, so_far = [], np.ones(len(score))
    for j in range(score.shape[1]):
        here = counts[:, j]
        options = 1 / (1 + np.exp(-score[:, j, None] / GRID))
        errors = [
            calibration_error((so_far * options[:, i])[here], truth[here, j])
            for i in range(len(GRID))
        ]
        best = int(np.argmin(errors))
        found.append(round(float(GRID[best]), 4))
        so_far = so_far * options[:, best]
    return found


def _logits(confidence: np.ndarray) -> np.ndarray:
    clipped = np.clip(confidence, 1e-6, 1 - 1e-6)
    return np.log(clipped) - np.log1p(-clipped)


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


def plot(result: dict[str, Any], file: Path) -> None:
    """Draws how often drafts survive against how sure the drafter was of it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(4.5, 4.5))
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for name in ("before", "after"):
        said, truth, _ = zip(*result[name]["reliability"], strict=True)
        label = f"{name} scaling: error {100 * result[name]['error']:.1f} %"
        axes.plot(said, truth, marker="o", label=label)
    axes.set(xlabel="survival that was said", ylabel="survival that was found")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
