"""What each routed block does with its tokens: agreement with top-k, realised capacity, weights, positions.

Vocabulary. *Members* are the top-k tokens of a routed block, what training runs on. A causal selection *decides* token
by token and is right where it agrees with membership. Plain NumPy: counts are summed over batches and divided once, at
the end, so that the result does not depend on how the tokens were batched. A ratio with nothing below the line is NaN.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Norm of a routed block's update over that of the residual. Below, the block is dead; above, it drowns all others.
HEALTHY_UPDATE_RATIO = (0.005, 5.0)
# Mean error of realised capacity, relative to what top-k keeps, from which a selection is not the one that was trained.
FAR_FROM_CAPACITY = 0.25
NUM_DECILES = 10
OF_A_SELECTION = (
    "accuracy",
    "precision",
    "recall",
    "recall_lift",
    "f1",
    "realised_capacity",
)  # the rest is about top-k alone


def block_name(depth: int) -> str:
    """The block's name in metric keys: `block03`."""
    return f"block{depth:02d}"


class RoutingStats:
    """Sums over batches; `summary` turns the sums into statistics, one entry per routed block."""

    def __init__(self, depths: Sequence[int]):
        """`depths`: depth in the stack of each of the L routed blocks."""
        self.depths = tuple(depths)
        zeros = np.zeros(len(self.depths), np.int64)
        self._valid, self._members, self._decided, self._hits = zeros, zeros, zeros, zeros
        self._weight, self._weight_squared = np.zeros(len(self.depths)), np.zeros(len(self.depths))
        self._members_LT = self._valid_T = None  # by position in the row; its length is known with the first batch

    def update(self, router_logits_LBT, decided_LBT, topk_LBT, valid_BT, weights_LBT=None) -> None:
        """Adds one batch. `weights_LBT`: the gate's weights, where they are not the raw router logits."""
        valid_BT = np.asarray(valid_BT, bool)
        member_LBT = np.asarray(topk_LBT, bool) & valid_BT
        decided_LBT = np.asarray(decided_LBT, bool) & valid_BT
        expected = (len(self.depths), *valid_BT.shape)
        for name, array in dict(router_logits=router_logits_LBT, decided=decided_LBT, topk=member_LBT).items():
            if np.shape(array) != expected:
                raise ValueError(f"{name} has shape {np.shape(array)}, expected {expected} (blocks, rows, positions)")

        def count(mask_LBT):
            return mask_LBT.sum(axis=(1, 2))

        self._valid = self._valid + valid_BT.sum()
        self._members = self._members + count(member_LBT)
        self._decided = self._decided + count(decided_LBT)
        self._hits = self._hits + count(member_LBT & decided_LBT)

        weights_LBT = np.asarray(router_logits_LBT if weights_LBT is None else weights_LBT, np.float64)
        kept_LBT = np.where(member_LBT, weights_LBT, 0.0)
        self._weight = self._weight + kept_LBT.sum(axis=(1, 2))
        self._weight_squared = self._weight_squared + (kept_LBT**2).sum(axis=(1, 2))

        if self._valid_T is None:
            self._members_LT = np.zeros((len(self.depths), valid_BT.shape[-1]), np.int64)
            self._valid_T = np.zeros(valid_BT.shape[-1], np.int64)
        self._members_LT += member_LBT.sum(axis=1)
        self._valid_T += valid_BT.sum(axis=0)

    def summary(self) -> dict[str, np.ndarray]:
        """Statistics by name, each of shape [L]; `position_share` is [L, 10].

        `base_rate_accuracy` is what "bypass" for every token would score: an accuracy means something only above it.
        `position_share` is the share of members in each tenth of the row, first tenth first; `position_entropy` is its
        entropy, 1 when positions do not matter and 0 when one tenth takes all. `position_r2` is the share of the
        variance of membership that the position in the row explains, adjusted for the number of positions.
        `recall_lift` is recall beyond chance: 0 for a random choice of as many tokens, 1 for top-k itself.
        """
        members, decided, hits, valid = self._members, self._decided, self._hits, self._valid
        misses, false_alarms = members - hits, decided - hits
        mean = _divide(self._weight, members)
        recall, chance = _divide(hits, members), _divide(decided, valid)
        share_L10 = _divide(self._members_by_decile(), members[:, None])
        logs_L10 = np.log(share_L10, out=np.zeros_like(share_L10), where=share_L10 > 0)
        return dict(
            accuracy=_divide(valid - misses - false_alarms, valid),
            base_rate_accuracy=_divide(valid - members, valid),
            precision=_divide(hits, decided),
            recall=recall,
            recall_lift=_divide(recall - chance, 1 - chance),
            f1=_divide(2 * hits, members + decided),
            realised_capacity=chance,
            topk_fraction=_divide(members, valid),
            weight_mean=mean,
            weight_std=np.sqrt(np.maximum(_divide(self._weight_squared, members) - mean**2, 0.0)),
            position_share=share_L10,
            position_r2=self._position_r2(),
            position_entropy=-(share_L10 * logs_L10).sum(axis=-1) / np.log(NUM_DECILES),
        )

    def _members_by_decile(self) -> np.ndarray:
        if self._members_LT is None:
            return np.zeros((len(self.depths), NUM_DECILES))
        seq_len = self._valid_T.size
        decile_T = np.arange(seq_len) * NUM_DECILES // seq_len
        return np.stack([self._members_LT[:, decile_T == d].sum(axis=1) for d in range(NUM_DECILES)], axis=1)

    def _position_r2(self) -> np.ndarray:
        """Of a one-way analysis of variance with one group per position; NaN with a single token per position."""
        if self._members_LT is None:
            return np.full(len(self.depths), np.nan)
        members_LT, valid_T = self._members_LT[:, self._valid_T > 0], self._valid_T[self._valid_T > 0]
        total = valid_T.sum()
        mean_L1 = members_LT.sum(axis=1, keepdims=True) / total
        between_L = (valid_T * (members_LT / valid_T - mean_L1) ** 2).sum(axis=1)
        all_L = total * (mean_L1 * (1 - mean_L1))[:, 0]
        return 1 - _divide((all_L - between_L) * (total - 1), all_L * (total - valid_T.size))

    def metrics(self, selection: str) -> dict[str, float]:
        """What `selection` decided, under the keys of metrics.jsonl: `routing/block03/recall/predictor`.

        For "topk" everything else, which is about the members alone: `routing/block03/weight_mean`,
        `routing/block03/position_share/0`.
        """
        metrics = {}
        for name, values in self.summary().items():
            if (name in OF_A_SELECTION) == (selection == "topk"):
                continue
            for depth, value in zip(self.depths, values, strict=True):
                key = f"routing/{block_name(depth)}/{name}" + ("" if selection == "topk" else f"/{selection}")
                if np.ndim(value):
                    metrics |= {f"{key}/{i}": float(v) for i, v in enumerate(value)}
                else:
                    metrics[key] = float(value)
        return metrics


def capacities(metrics: Mapping[str, Any], selection: str) -> list[tuple[str, float, float]]:
    """(block, realised capacity under a causal selection, fraction that top-k keeps) of each routed block evaluated."""
    found = (re.fullmatch(rf"routing/(block\d+)/realised_capacity/{selection}", key) for key in metrics)
    return [(m[1], metrics[m[0]], metrics[f"routing/{m[1]}/topk_fraction"]) for m in found if m]


def capacity_error(metrics: Mapping[str, Any], selection: str) -> float | None:
    """How far a causal selection is from the capacity of top-k: the mean over blocks of |realised / kept - 1|.

    0 is exact, 1 is what routing nothing gives. None if the selection was not evaluated.
    """
    errors = [abs(realised / kept - 1) for _, realised, kept in capacities(metrics, selection)]
    return float(np.mean(errors)) if errors else None


def explained_by_token(scores_M: np.ndarray, tokens_M: np.ndarray) -> float:
    """Share of the scores' variance that the current token alone explains: 1 when the router is a table of tokens."""
    _, token_M, count_V = np.unique(tokens_M, return_inverse=True, return_counts=True)
    mean_V = np.bincount(token_M, weights=scores_M) / count_V
    return float(1 - np.var(scores_M - mean_V[token_M]) / np.var(scores_M))


def _divide(numerator, denominator) -> np.ndarray:
    """The ratio in float64, NaN where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(np.asarray(numerator, np.float64), np.asarray(denominator, np.float64))
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator != 0)
