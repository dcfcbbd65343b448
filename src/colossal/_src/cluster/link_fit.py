"""From measured times to the alpha and beta of a link."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from colossal._src.cluster.link_cost import AxisCost, Link, LinkOp, collective_cost_factors

Timings = Sequence[tuple[int, float]]

# [Note: a fit that outliers cannot bend]
# Times range over four decades, and a scheduler now and then stops a rank for milliseconds, never the other way round.
# So each size is measured often and the lower quartile of its times counts, which holds although three of four are
# disturbed. The line through these points minimizes the sum of *relative* deviations, which neither the largest size
# nor one odd size can dominate. At the minimum of such a sum the line passes through two of the points, or through one
# of them and the origin of an axis, so that trying all of these finds it exactly.


def typical(samples: Sequence[float]) -> float:
    """Return what undisturbed measurements take: the lower quartile of all."""
    return float(np.quantile(np.asarray(samples), 0.25))


def fit_axis(size: int, timings: Mapping[LinkOp, Timings]) -> AxisCost:
    """Fit the links of one axis."""
    ops: dict[LinkOp, Link] = {
        op: fit_link([_point(op, size, pair) for pair in pairs], pairs) for op, pairs in timings.items()
    }
    together = [_point(op, size, pair) for op, pairs in timings.items() for pair in pairs]
    return AxisCost(size, fit_link(together), ops)


def fit_link(points: Iterable[tuple[float, float, float]], timings: Timings = ()) -> Link:
    """Find the alpha and beta, neither negative, that predict times best."""
    table = np.array(list(points), dtype=np.float64)
    design, seconds = table[:, :2], table[:, 2]
    candidates = _candidates(design, seconds)
    deviations = np.abs(candidates @ design.T / seconds - 1)
    best = int(deviations.sum(axis=1).argmin())
    alpha, beta = candidates[best]
    return Link(float(alpha), float(beta), float(np.median(deviations[best])), tuple(timings))


def _candidates(design: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Every (alpha, beta) that meets two points, or one point with the other number 0."""
    first, second = np.triu_indices(len(seconds), 1)
    determinants = design[first, 0] * design[second, 1] - design[second, 0] * design[first, 1]
    first, second, determinants = (part[determinants != 0] for part in (first, second, determinants))
    alphas = (seconds[first] * design[second, 1] - seconds[second] * design[first, 1]) / determinants
    betas = (design[first, 0] * seconds[second] - design[second, 0] * seconds[first]) / determinants
    both = np.stack([alphas, betas], axis=1)
    zero = np.zeros(len(seconds))
    only_alpha = np.stack([seconds / design[:, 0], zero], axis=1)
    only_beta = np.stack([zero, seconds / design[:, 1]], axis=1)
    return np.concatenate([both[(both >= 0).all(axis=1)], only_alpha, only_beta])


def _point(op: LinkOp, size: int, pair: tuple[int, float]) -> tuple[float, float, float]:
    num_bytes, seconds = pair
    messages, fraction = collective_cost_factors(op, size)
    return messages, fraction * num_bytes, seconds
