"""Low-rank additions: nothing at the start, the same merged or not, and no block knows of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TINY

from mod_jax.config import make_config
from mod_jax.models import lora
from mod_jax.models.model import make_model

VOCAB = 40
LORA = {"optimizer.train": "lora", "optimizer.lora_rank": 3, "optimizer.lora_alpha": 6.0}
TOKENS_BT = np.random.default_rng(0).integers(0, VOCAB, (2, 16)).astype(np.int32)


def models(**changes):
    """(plain, with additions), of one seed."""
    plain = make_model(make_config(**{**TINY, **changes}), VOCAB)
    return plain, make_model(make_config(**{**TINY, **changes, **LORA}), VOCAB)


def random_like(tree, seed=0, scale=0.3):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(scale * rng.standard_normal(leaf.shape), leaf.dtype), tree)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_it_begins_as_the_model_bit_for_bit():
    plain, adapted = models()
    params = jax.jit(adapted.init)()
    factors = jax.tree_util.tree_leaves_with_path(params["lora"])
    assert all(leaf.any() == (path[-1].key == "a") for path, leaf in factors)
    start = jax.jit(plain.init)()
    assert_equal(jax.jit(adapted.merged)(params), start)
    logits = [jax.jit(model.run)(p, TOKENS_BT).logits_BTV for model, p in ((plain, start), (adapted, params))]
    assert_equal(*logits)


@pytest.mark.parametrize("changes", [{}, {"model.depth": 3}, {"model.layout": "FE"}], ids=["units", "tail", "experts"])
def test_merged_is_the_sum_by_hand(changes):
    """Each matrix is W + 2 A B, of its own block, and of its own expert."""
    plain, adapted = models(**changes)
    params = random_like(adapted.abstract_params)
    found = adapted.merged(params)
    assert jax.tree.structure(found) == jax.tree.structure(plain.abstract_params)
    added = {}

    def compare(path, weight, was, group):
        name = path[-1].key
        if group != "matrix" or path[0].key == "embedder":
            np.testing.assert_array_equal(weight, was)
            return
        factors = params["lora"]
        for part in path:
            factors = factors[part.key]
        stacked = int(path[0].key == "units") + int("E" in name.split("_")[1])
        size_in = {"o_NHD": 2}.get(name, 1)
        a, b = np.asarray(factors["a"]), np.asarray(factors["b"])
        lead = was.shape[:stacked]
        rows = int(np.prod(was.shape[stacked : stacked + size_in]))
        product = a.reshape(*lead, rows, 3) @ b.reshape(*lead, 3, -1)
        np.testing.assert_allclose(weight, was + 2 * product.reshape(was.shape), rtol=1e-5, atol=1e-5)
        added[name] = True

    plain_params = {name: part for name, part in params.items() if name != "lora"}
    jax.tree_util.tree_map_with_path(compare, found, plain_params, plain.groups)
    matrices = {"up_EDF", "down_EFD"} if "model.layout" in changes else set()
    assert set(added) == {"q_DNH", "k_DKH", "v_DKH", "o_NHD", "up_DF", "down_FD"} | matrices


def test_merged_equals_unmerged():
    plain, adapted = models()
    params = random_like(adapted.abstract_params)
    apart = jax.jit(adapted.run)(params, TOKENS_BT).logits_BTV
    merged = jax.jit(plain.run)(jax.jit(adapted.merged)(params), TOKENS_BT).logits_BTV
    np.testing.assert_allclose(apart, merged, rtol=1e-4, atol=1e-4)
    without = jax.jit(plain.run)({n: p for n, p in params.items() if n != "lora"}, TOKENS_BT).logits_BTV
    assert np.abs(without - merged).max() > 0.1


def test_factors_are_few_and_lie_on_the_axes_of_their_matrix():
    _, adapted = models(**{"model.depth": 2})
    block = adapted.abstract_params["lora"]["units"]["blocks"][0]
    shapes = jax.tree.map(lambda leaf: leaf.shape, block["attention"])
    assert shapes["q_DNH"] == {"a": (1, 16, 3), "b": (1, 3, 2, 8)}
    assert shapes["o_NHD"] == {"a": (1, 2, 8, 3), "b": (1, 3, 16)}
    specs = adapted.logical_specs["lora"]["units"]["blocks"][0]["mlp"]["down_FD"]
    assert (tuple(specs["a"]), tuple(specs["b"])) == (("layers", "mlp", None), ("layers", None, "embed"))
    assert set(jax.tree.leaves(adapted.groups["lora"])) == {"lora"}
    assert "embedder" not in adapted.abstract_params["lora"]


def test_factors_of_another_seed_are_others():
    plans = lora.additions(*(getattr(models()[0], n) for n in ("abstract_params", "logical_specs", "groups")), 3)
    first, again, other = (jax.tree.leaves(lora.init(plans, seed)) for seed in (0, 0, 1))
    assert_equal(first, again)
    assert any((a != b).any() for a, b in zip(first, other, strict=True))
    matrices = [leaf for leaf in first if leaf.any()]
    assert not any(a.shape == b.shape and (a == b).all() for i, a in enumerate(matrices) for b in matrices[:i])
