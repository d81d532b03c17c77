"""What blocks with experts do with their tokens: load, drops, where in the row, and what the choice goes with.

A *choice* is an expert, or a no-op; a *claim* is one token's choice of one of them (see `mod_jax.expert_routing`). A
claim of an expert that finds no slot is *dropped*; a no-op drops nothing. A *load* is a choice's share of all claims in
units of an even share: 1 everywhere if all are chosen alike. An expert is *dead* below `DEAD_LOAD`. Plain NumPy.
Vocabulary: L blocks with experts, E experts, N choices (experts, then no-ops), A claims per token, M tokens.
"""

from typing import NamedTuple

import numpy as np

from mod_jax.analysis.routing_stats import NUM_DECILES, block_name

DEAD_LOAD = 0.05
NUM_SHUFFLES = 20
LOAD_STATISTICS = ("load_entropy", "smallest_load", "dead")


def load_statistics(load_N: np.ndarray, num_experts: int) -> dict[str, float]:
    """What the loads of one block say: `load_entropy`, of the shares of all choices, 1 where they are even;
    `smallest_load` of an expert; and how many experts are `dead`. NaN where nothing was claimed."""
    load_N = np.asarray(load_N, np.float64)
    if not load_N.sum() > 0:
        return dict.fromkeys(LOAD_STATISTICS, float("nan"))
    share_N = load_N / load_N.sum()
    even = len(share_N) * share_N[:num_experts]
    logs_N = np.log(share_N, out=np.zeros_like(share_N), where=share_N > 0)
    entropy = -float(share_N @ logs_N) / np.log(len(share_N)) if len(share_N) > 1 else 1.0
    return {
        "load_entropy": entropy,
        "smallest_load": float(even.min()),
        "dead": int(np.sum(even < DEAD_LOAD)),
    }


class ExpertPositions:
    """Where in the row experts compute and where they drop, summed over batches and divided once, at the end."""

    def __init__(self, depths: tuple[int, ...], num_experts: int):
        """`depths`: depth in the stack of each of the L blocks with experts."""
        self._depths, self._num_experts = depths, num_experts
        self._sums_L4P = np.zeros((len(depths), 4, NUM_DECILES), np.int64)  # tokens, computed, claims, dropped

    def update(self, choice_LBTA: np.ndarray, has_slot_LBTA: np.ndarray, valid_BT: np.ndarray) -> None:
        """Adds one batch: the choices of each token, -1 for none, and whether an expert computed on them."""
        wants_LBTA = (choice_LBTA >= 0) & (choice_LBTA < self._num_experts) & valid_BT[None, :, :, None]
        computed_LBT = np.any(has_slot_LBTA, axis=-1) & valid_BT
        tokens_LBT = np.broadcast_to(valid_BT, computed_LBT.shape)
        dropped_LBT = np.sum(wants_LBTA & ~has_slot_LBTA, axis=-1)
        sums_L4T = np.stack([x.sum(axis=1) for x in (tokens_LBT, computed_LBT, wants_LBTA.sum(-1), dropped_LBT)], 1)
        length = valid_BT.shape[1]
        decile_T = np.arange(length) * NUM_DECILES // length
        self._sums_L4P += np.stack([sums_L4T[..., decile_T == p].sum(-1) for p in range(NUM_DECILES)], axis=-1)

    def metrics(self) -> dict[str, float]:
        """`experts/block00/computed_by_position/3`: of the tokens in that tenth of the row, the fraction that an expert
        computed on; `dropped_by_position`: of the claims of experts there, the fraction that found no slot."""
        tokens_LP, computed_LP, claims_LP, dropped_LP = np.moveaxis(self._sums_L4P, 1, 0)
        shares = {"computed_by_position": (computed_LP, tokens_LP), "dropped_by_position": (dropped_LP, claims_LP)}
        return {
            f"experts/{block_name(depth)}/{name}/{p}": float(part_LP[i, p] / whole_LP[i, p])
            for i, depth in enumerate(self._depths)
            for name, (part_LP, whole_LP) in shares.items()
            for p in range(NUM_DECILES)
            if whole_LP[i, p]
        }


class Explained(NamedTuple):
    """Share of the entropy of a choice that the token alone explains: as found, and with the choices shuffled over the
    tokens. What a rare token explains by chance shows in both."""

    share: float
    shuffled: float


def explained_by_token(choice_M: np.ndarray, token_M: np.ndarray) -> Explained:
    """How far the choice of an expert is a look-up of the token: I(choice; token) / H(choice). NaN for one choice."""
    _, choice_M = np.unique(choice_M, return_inverse=True)
    _, token_M = np.unique(token_M, return_inverse=True)
    whole = _entropy(np.bincount(choice_M))
    if not whole > 0:
        return Explained(float("nan"), float("nan"))

    def share(choice_M) -> float:
        table = np.zeros((token_M.max() + 1, choice_M.max() + 1))
        np.add.at(table, (token_M, choice_M), 1)
        within = sum(row.sum() * _entropy(row) for row in table) / choice_M.size
        return float(1 - within / whole)

    rng = np.random.default_rng(0)
    return Explained(share(choice_M), float(np.mean([share(rng.permutation(choice_M)) for _ in range(NUM_SHUFFLES)])))


def choices_of_tokens(choice_M: np.ndarray, token_M: np.ndarray, num_choices: int, most: int):
    """(the `most` most frequent tokens; of the claims of each, the share that each choice takes, [tokens, N]).

    Tokens with the same favourite stand together, those that are surest of it first.
    """
    ids, identity_M, counts = np.unique(token_M, return_inverse=True, return_counts=True)
    table = np.zeros((ids.size, num_choices))
    np.add.at(table, (identity_M, choice_M), 1)
    kept = np.argsort(-counts, kind="stable")[:most]
    share = table[kept] / counts[kept, None]
    order = np.lexsort((-share.max(axis=1), share.argmax(axis=1)))
    return ids[kept][order], share[order]


def _entropy(counts: np.ndarray) -> float:
    share = counts[counts > 0] / counts.sum()
    return float(-np.sum(share * np.log(share)))
