"""What routing decisions go with, and how much of that is more than a look-up of the token. NumPy alone.

Every number has its control. A share of selected tokens stands beside the share that the tokens' identities alone would
give. A correlation stands beside the one that is left within tokens of one identity at about one place of the row.
Agreement of two blocks is beyond chance. Vocabulary: N tokens, W windows.
"""

from typing import NamedTuple

import numpy as np

NUM_RESAMPLES = 400


class Share(NamedTuple):
    """Of the tokens of one kind: how many there are, the fraction selected, and the fraction that would be if only the
    token's identity counted."""

    count: int
    selected: float
    by_identity: float


def share_by_class(selected_N: np.ndarray, class_N: np.ndarray, token_N: np.ndarray, num_classes: int) -> list[Share]:
    """The share of each class 0, 1, ...; tokens of other classes count for identities alone."""
    _, identity_N = np.unique(token_N, return_inverse=True)
    rate = np.bincount(identity_N, selected_N) / np.bincount(identity_N)
    shares = []
    for index in range(num_classes):
        chosen = class_N == index
        if not chosen.any():
            shares.append(Share(0, np.nan, np.nan))
            continue
        shares.append(Share(int(chosen.sum()), selected_N[chosen].mean(), rate[identity_N[chosen]].mean()))
    return shares


class Correlation(NamedTuple):
    """Pearson's r with the central 95 % of its resamples over windows."""

    r: float
    low: float
    high: float


def correlation(
    x_N: np.ndarray, y_N: np.ndarray, window_N: np.ndarray, group_N: np.ndarray | None = None
) -> Correlation:
    """Pearson's r of two numbers of each token; with `group_N`, of their deviations from the means of its group.

    Args:
      window_N: index of the window of each token: the tokens of one are not independent, so windows are resampled.
      group_N: what is held fixed. Groups of one token have no deviation, and so no weight.
    """
    if group_N is None:
        group_N = np.zeros(x_N.size, int)
    x_N, y_N = (_deviations(v, group_N) for v in (x_N, y_N))
    sums_W3 = np.stack([np.bincount(window_N, v) for v in (x_N * y_N, x_N**2, y_N**2)], axis=1)
    draws = np.random.default_rng(0).integers(len(sums_W3), size=(NUM_RESAMPLES, len(sums_W3)))
    low, high = np.nanquantile(_r(sums_W3[draws].sum(axis=1)), (0.025, 0.975))
    return Correlation(float(_r(sums_W3.sum(axis=0))), float(low), float(high))


def agreement(one_N: np.ndarray, other_N: np.ndarray) -> float:
    """Cohen's kappa of two blocks' decisions: 1 the same, 0 as often alike as by chance. NaN: one never varies."""
    alike = np.mean(one_N == other_N)
    p, q = np.mean(one_N), np.mean(other_N)
    chance = p * q + (1 - p) * (1 - q)
    return float((alike - chance) / (1 - chance)) if chance < 1 else float("nan")


def fixed_tokens(
    selected_N: np.ndarray, token_N: np.ndarray, min_count: int = 50, margin: float = 0.01
) -> tuple[list[int], list[int]]:
    """(ids selected in at least 1 - margin of the cases, ids selected in at most margin), of ids seen often enough."""
    ids, identity_N, counts = np.unique(token_N, return_inverse=True, return_counts=True)
    rate = np.bincount(identity_N, selected_N) / counts
    often = counts >= min_count
    return ids[often & (rate >= 1 - margin)].tolist(), ids[often & (rate <= margin)].tolist()


def groups(*labels_N: np.ndarray) -> np.ndarray:
    """One group per combination of labels."""
    return np.unique(np.stack(labels_N), axis=1, return_inverse=True)[1].ravel()


def _deviations(values_N: np.ndarray, group_N: np.ndarray) -> np.ndarray:
    values_N = values_N.astype(np.float64)
    counts = np.bincount(group_N)
    return values_N - (np.bincount(group_N, values_N) / np.maximum(counts, 1))[group_N]


def _r(sums_3: np.ndarray) -> np.ndarray:
    xy, xx, yy = np.moveaxis(sums_3, -1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return xy / np.sqrt(xx * yy)
