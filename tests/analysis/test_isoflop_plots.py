"""Figures of an isoFLOP study show every run and every optimum, and tell the variants apart without colour."""

import warnings

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mod_jax.analysis import isoflop, isoflop_plots
from mod_jax.analysis.isoflop import Curve, Optimum, Refused
from mod_jax.analysis.isoflop_plots import Panel

VARIANTS = ("dense", "mod", "stochastic", "shallow")
BUDGETS = (3e12, 1e13, 3e13)


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def curves(budgets=BUDGETS, scale=0.006):
    """Losses about a minimum that moves right and down with the budget; mod is larger and a little better."""
    rng, made = np.random.default_rng(0), {}
    for budget in budgets:
        for place, variant in enumerate(VARIANTS):
            best = 1.4e5 * (budget / 3e12) ** 0.5 * (1, 1.7, 1.5, 0.6)[place]
            sizes = best * 1.6 ** (np.arange(6) - 2.2)
            losses = 1.42 * (budget / 3e12) ** -0.06 + (0.0, -0.01, 0.02, 0.0)[place]
            losses = losses + 0.03 * np.log(sizes / best) ** 2 + rng.normal(scale=scale, size=6)
            made[budget, variant] = Curve(sizes, losses)
    return made


def panels(**options):
    made = curves(**options)
    causal = {key: Curve(sizes, losses + 0.004) for key, (sizes, losses) in made.items()}
    return [Panel("top-k", made, isoflop.fit_curves(made)), Panel("causal", causal, isoflop.fit_curves(causal))]


def laws(of):
    return {
        (variant, what): isoflop.fit_power_law(BUDGETS, [of.optima[b, variant] for b in BUDGETS], what)
        for variant in VARIANTS
        for what in ("size", "loss")
    }


def drawn(figure):
    FigureCanvasAgg(figure).draw()
    return figure


def dots(ax):
    """Points of runs, which are hollow."""
    lines = [line for line in ax.lines if line.get_markerfacecolor() == "none"]
    return np.concatenate([line.get_xydata() for line in lines])


def test_every_run_and_every_line_is_drawn():
    both = panels()
    figure = drawn(isoflop_plots.loss_against_size(both, VARIANTS, "parameters"))
    for ax, panel in zip(figure.axes, both, strict=True):
        shown = dots(ax)
        for sizes, losses in panel.curves.values():
            for point in zip(sizes, losses, strict=True):
                assert (np.isclose(shown, point).all(axis=1)).any()
        assert {text.get_text() for text in ax.texts} == {"3e12", "1e13", "3e13"}
        assert len(ax.containers) == sum(isinstance(o, Optimum) for o in panel.optima.values()) >= 10


def test_a_curve_without_an_optimum_keeps_its_runs():
    both = panels(budgets=(3e12,))
    both = [panel._replace(optima={key: Refused("a reason") for key in panel.optima}) for panel in both]
    figure = drawn(isoflop_plots.loss_against_size(both, VARIANTS, "parameters"))
    assert len(dots(figure.axes[0])) == 6 * len(VARIANTS)
    assert not figure.axes[0].containers


def test_variants_differ_in_marker_and_line():
    looks = isoflop_plots.look_of(VARIANTS).values()
    assert len({look["marker"] for look in looks}) == len({look["linestyle"] for look in looks}) == len(VARIANTS)


def test_cost_is_relative_to_the_best_dense_model():
    both = panels(budgets=(3e12,))
    seconds = {key: 1e-10 * curve.sizes for key, curve in both[0].curves.items()}  # time as FLOPs
    figure = drawn(isoflop_plots.loss_against_cost(3e12, both, VARIANTS, seconds))
    assert len(figure.axes) == 4
    by_flops, by_time = (dots(ax) for ax in figure.axes[:2])
    np.testing.assert_allclose(by_flops, by_time, rtol=1e-6)
    best = both[0].optima[3e12, "dense"]
    sizes, losses = both[0].curves[3e12, "mod"]
    expected = np.stack([sizes / best.size, losses - best.loss], axis=-1)
    assert all(np.isclose(by_flops, point).all(axis=1).any() for point in expected)


def test_optima_are_drawn_with_their_law():
    both = panels()
    figure = drawn(isoflop_plots.optima_against_budget(both, [laws(panel) for panel in both], VARIANTS, "parameters"))
    for ax in figure.axes:
        assert len(ax.containers) == len(VARIANTS)
        assert ax.get_xscale() == ax.get_yscale() == "log"
