"""Figures show the numbers they are given, name their selection mode, and clip nothing."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
from matplotlib import colors
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mod_jax.analysis import expert_plots, plots
from mod_jax.analysis.expert_stats import Explained


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # missing glyphs, layout that does not fit
        yield


def _rows(num=60, selections=("predictor",)):
    rows = []
    for step in range(10, 10 * num + 1, 10):
        rows.append({"step": step, "train/loss": 2 + 1 / step, "train/tokens": 512 * step, "train/flops": 1e9 * step})
        rows[-1] |= {"routing/block01/update_ratio": 0.3, "routing/block03/update_ratio": 0.1 * step}
        if step % 100 == 0:
            causal = {f"eval/causal_loss/{name}": 2.1 + 0.01 * i for i, name in enumerate(selections, start=1)}
            rows.append({"step": step, "eval/topk_loss": 2.1, **causal})
    return rows


def _labels(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def _line(ax, label):
    return next(line for line in ax.lines if line.get_label() == label)


def _figures():
    rng = np.random.default_rng(0)
    choice_LTA = rng.integers(0, 12, (3, 136, 2))
    names = expert_plots.choice_names(8, 12)
    text = list("def f(x):\n\treturn x_1 + $y$ # é日\x00" * 4)
    selected_LT = rng.random((4, len(text))) < 0.2
    scores = [rng.normal(size=500) for _ in range(4)]
    return dict(
        loss=plots.loss_curves(_rows()),
        token_map=plots.routed_token_map(text, selected_LT, [1, 3, 5, 7], rng.normal(size=selected_LT.shape), 0.2),
        word_map=plots.routed_token_map([" the", " cat"] * 40, selected_LT[:, :80], [1, 3, 5, 7]),
        scores=plots.score_histograms(scores, [1.0] * 4, [1, 3, 5, 7], [s > 1 for s in scores]),
        position=plots.routing_by_position(rng.dirichlet(np.ones(10), size=9), list(range(1, 18, 2))),
        health=plots.block_health(_rows()),
        expert_map=expert_plots.expert_token_map(
            text, choice_LTA[:, : len(text)], choice_LTA[:, : len(text)] < 8, [0, 1, 2], 8
        ),
        loads=expert_plots.expert_loads(rng.random((5, 12)), range(5), 8),
        by_position=expert_plots.experts_by_position(rng.random((9, 10)), rng.random((9, 10)), range(9)),
        of_tokens=expert_plots.experts_of_tokens(
            [(text[:30], rng.dirichlet(np.ones(12), size=30))] * 4, [Explained(0.5, 0.1)] * 4, range(4), names
        ),
    )


@pytest.mark.parametrize(
    "name",
    [
        "loss",
        "token_map",
        "word_map",
        "scores",
        "position",
        "health",
        "expert_map",
        "loads",
        "by_position",
        "of_tokens",
    ],
)
def test_figure_saves_and_clips_nothing(tmp_path, name):
    fig = _figures()[name]
    plots.save(fig, tmp_path / "report" / "figure.png")
    assert (tmp_path / "report" / "figure.png").stat().st_size > 5_000
    FigureCanvasAgg(fig).draw()
    box, (width, height) = fig.get_tightbbox(), fig.get_size_inches()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height


def test_nothing_global_is_touched_and_nothing_is_loaded_before_something_is_drawn():
    code = (
        "import sys, mod_jax.training.loop; assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; before = matplotlib.rcParams.copy()\n"
        "from mod_jax.analysis import plots\n"
        "plots.routing_by_position([[0.1] * 10], [1])\n"
        "assert matplotlib.rcParams.copy() == before\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loss_curves_name_the_selection_and_show_the_gap():
    fig = plots.loss_curves(_rows(200, selections=("predictor", "threshold")))
    top, below = fig.axes
    expected = {"training, top-k", "training, top-k, smoothed", "held out, top-k"}
    assert set(_labels(top)) == expected | {"held out, causal: predictor", "held out, causal: threshold"}
    np.testing.assert_allclose(below.lines[0].get_ydata(), 0.01, atol=1e-9)
    np.testing.assert_allclose(below.lines[1].get_ydata(), 0.02, atol=1e-9)
    np.testing.assert_allclose(below.lines[0].get_xdata(), np.arange(100, 2001, 100))


def test_loss_of_a_dense_run_claims_no_selection():
    rows = [{"step": i, "train/loss": 2.0, "eval/topk_loss": 2.1} for i in range(1, 5)]
    assert _labels(plots.loss_curves(rows).axes[0]) == ["training, no routing", "held out, no routing"]


def test_every_line_of_a_short_run_can_be_seen():
    """Its first values are far above the rest, and it is too short to smooth."""
    rows = [{"step": 10 * i, "train/loss": 2.0 + 4.0 * (i == 0), "eval/topk_loss": 2.1} for i in range(7)]
    ax = plots.loss_curves(rows).axes[0]
    assert len(ax.lines) == len(_labels(ax)) == 2
    assert ax.get_ylim()[1] < 2.5


def test_a_selection_has_one_colour_and_marker_whatever_else_is_drawn():
    def look(*selections):
        top = plots.loss_curves(_rows(selections=selections)).axes[0]
        line = _line(top, "held out, causal: threshold")
        return line.get_color(), line.get_marker()

    assert look("threshold") == look("predictor", "threshold") == look("predictor", "router", "threshold")
    looks = [tuple(style.items()) for style in plots.SELECTIONS.values()]
    assert len(set(looks)) == len({style["marker"] for style in plots.SELECTIONS.values()}) == len(plots.SELECTIONS)


def test_maps_with_one_range_give_one_weight_one_colour():
    def colour(weights, **options):
        return _boxes(plots.routed_token_map(list("ab"), np.ones((1, 2), bool), [1], np.array([weights]), **options))[
            0
        ][3]

    assert colour([1.0, 2.0]) != colour([1.0, 9.0])
    assert colour([1.0, 2.0], weight_range=(0.0, 9.0)) == colour([1.0, 9.0], weight_range=(0.0, 9.0))


@pytest.mark.parametrize("name", ["loss", "token_map", "scores", "position", "health"])
def test_a_caption_fits_below_every_figure(name):
    fig = _figures()[name]
    plots.add_caption(fig, "run-with-a-name, seed 0, step 828, corpus 0123456789ab, mod_jax 0123456789ab-dirty")
    FigureCanvasAgg(fig).draw()
    caption = (fig.texts + [fig._supxlabel])[-1] if name != "token_map" else fig.texts[-1]
    below = caption.get_window_extent()
    assert caption.get_text().startswith("run-with")
    assert below.x1 <= fig.bbox.x1
    assert not any(ax.get_tightbbox().overlaps(below) for ax in fig.axes if ax.axison)


def test_scores_and_positions_name_their_selection():
    scores = plots.score_histograms([np.arange(9.0)], [5.0], [1], [np.arange(9) > 5])
    positions = plots.routing_by_position(np.full((1, 10), 0.1), [1], selection="predictor")
    assert scores.get_suptitle() == "Router scores under top-k selection"
    assert "under predictor selection" in positions.get_suptitle()


def test_cost_axis_is_flops_else_tokens_else_absent():
    def cost_axis(rows):
        children = plots.loss_curves(rows).axes[0].child_axes
        return children and (children[0].get_xlabel(), children[0]._functions[0](10.0))

    rows = _rows()
    assert cost_axis(rows) == ("training FLOPs", pytest.approx(1e10))
    without_flops = [{k: v for k, v in row.items() if k != "train/flops"} for row in rows]
    assert cost_axis(without_flops) == ("training tokens", pytest.approx(5120))
    assert not cost_axis([{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 2.0}])


def test_rows_without_a_finite_value_are_left_out():
    rows = [
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "train/loss": np.nan},
        {"step": 3},
        {"step": 4, "train/loss": 1.0},
    ]
    line = _line(plots.loss_curves(rows).axes[0], "training, no routing")
    np.testing.assert_array_equal(line.get_xdata(), [1, 4])
    np.testing.assert_array_equal(line.get_ydata(), [3, 1])


def test_smoothing_by_hand():
    values = np.zeros(200)  # windows of two values to each side
    values[0], values[10], values[199] = 6.0, 5.0, 3.0
    smooth = plots.smooth(values)
    assert smooth[0] == 6.0  # nothing before it: alone
    assert smooth[1] == 2.0  # 6, 0, 0
    np.testing.assert_allclose(smooth[7:14], [0, 1, 1, 1, 1, 1, 0])
    assert smooth[199] == 1.0  # 0, 0, 3


def _boxes(fig):
    """Cells of a token map as (left, right, is a box, colour), in order of token and then block."""
    (cells,) = fig.axes[0].collections
    corners = [path.vertices for path in cells.get_paths()]
    shapes = [(v[:, 0].min(), v[:, 0].max(), np.ptp(v[:, 1]) > 0.5) for v in corners]
    return [(*shape, colors.to_hex(c)) for shape, c in zip(shapes, cells.get_facecolors(), strict=True)]


def test_token_map_boxes_are_the_selected_tokens_in_the_colour_of_their_block():
    selected_LT = np.array([[1, 0, 0], [1, 1, 0]], bool)
    boxes = _boxes(plots.routed_token_map(["a", "b", "c"], selected_LT, [1, 3]))
    assert [is_box for *_, is_box, _ in boxes] == [True, True, False, True, False, False]
    blue, vermillion, bypassed = plots.PALETTE[0], plots.PALETTE[1], plots.FAINT
    assert [colour for *_, colour in boxes] == [blue, vermillion, bypassed, vermillion, bypassed, bypassed]


def test_token_map_gives_a_piece_its_width_and_never_splits_it():
    boxes = _boxes(plots.routed_token_map([" the", "x", " cat", "sat"], np.ones((1, 4), bool), [1], columns=8))
    # Line of 8: 4 + 1, then " cat" does not fit and opens the next one: 4 + 3.
    np.testing.assert_allclose(
        [(left - 0.07, right + 0.07) for left, right, *_ in boxes], [(0, 4), (4, 5), (0, 4), (4, 7)]
    )


def test_token_map_shows_white_space_and_unknown_characters():
    fig = plots.routed_token_map(list("a \n\t\x00$日"), np.zeros((1, 7), bool), [1])
    assert "".join(text.get_text() for text in fig.axes[0].texts[:7]) == "a·↵→□$□"


def test_token_map_darkens_with_the_weight():
    weights_LT = np.array([[0.0, 1.0, 2.0, 9.0]])
    boxes = _boxes(plots.routed_token_map(list("abcd"), np.array([[1, 1, 1, 0]], bool), [1], weights_LT))
    light = [sum(colors.to_rgb(colour)) for *_, colour in boxes]
    assert light[0] > light[1] > light[2]
    assert boxes[3][3] == plots.FAINT  # bypassed: its weight is not used


def test_negative_weights_get_a_colour_of_their_own():
    weights_LT = np.array([[-2.0, 0.0, 2.0]])
    boxes = _boxes(plots.routed_token_map(list("abc"), np.ones((1, 3), bool), [1], weights_LT))
    (red, _, blue_of_negative), (zero, *_), (red_of_positive, _, blue) = (colors.to_rgb(c) for *_, c in boxes)
    assert red > blue_of_negative
    assert blue > red_of_positive
    assert zero < 0.9  # still visible on white


def test_histogram_counts_every_token_once():
    scores, mask = np.arange(1000.0), np.arange(1000) >= 900
    (ax,) = plots.score_histograms([scores], [900.0], [3], [mask]).axes
    bypassed, selected = (sum(bar.get_height() for bar in bars) for bars in ax.containers)
    assert (bypassed, selected) == (900, 100)
    assert ax.get_title(loc="left") == "block 3   10.0% selected"
    assert "cut-off 900" in _labels(ax)


def test_position_shares_are_per_cent():
    share_L10 = np.full((2, 10), 0.1)
    ax = plots.routing_by_position(share_L10, [1, 3]).axes[0]
    np.testing.assert_allclose(_line(ax, "block 3").get_ydata(), 10.0)


def test_health_shows_blocks_by_depth_and_the_band():
    ax = plots.block_health(_rows()).axes[0]
    assert _labels(ax) == ["block 1", "block 3"]
    assert ax.get_yscale() == "log"
    assert ax.get_ylim()[1] >= 60  # the ratio of block 3 at the end
    assert ax.get_ylim()[0] < 0.005


def test_blocks_differ_in_colour_and_keep_it():
    for count in (1, 6, 7, 24):
        hexes = [colors.to_hex(colour) for colour in plots.block_colours(range(count))]
        assert len(set(hexes)) == count
    assert plots.block_colours([1, 3]) == list(plots.PALETTE[:2])


def test_degenerate_input_still_draws(tmp_path):
    plots.save(plots.loss_curves([]), tmp_path / "a.png")
    plots.save(plots.block_health([]), tmp_path / "b.png")
    same, nan = np.zeros(50), np.full(50, np.nan)
    nan[:2] = 1.0, 2.0
    figure = plots.score_histograms([same, nan], [0.0, 1.5], [1, 3], [same > 0, nan > 1.5])
    plots.save(figure, tmp_path / "c.png")
    plots.save(plots.routed_token_map(["a"], np.zeros((1, 1), bool), [1], np.zeros((1, 1))), tmp_path / "d.png")


def test_map_of_experts_has_a_colour_per_expert_and_an_empty_box_where_one_dropped():
    """Two experts and a no-op (id 2), two claims: both, one dropped, a no-op beside an expert, none."""
    choice_LTA = np.array([[[0, 1], [1, 0], [2, 0], [-1, -1]]])
    has_slot_LTA = np.array([[[1, 1], [1, 0], [0, 1], [0, 0]]], bool)
    fig = expert_plots.expert_token_map(list("abcd"), choice_LTA, has_slot_LTA, [3], 2)
    boxes = _boxes(fig)
    blue, vermillion = plots.PALETTE[:2]
    assert [colour for *_, colour in boxes] == [blue, vermillion, vermillion, "#ffffff", blue, plots.FAINT]
    assert [is_box for *_, is_box, _ in boxes] == [True] * 5 + [False]
    np.testing.assert_allclose([x for box in boxes[:2] for x in box[:2]], [0.07, 0.5, 0.5, 0.93])
    (cells,) = fig.axes[0].collections
    assert colors.to_hex(cells.get_edgecolors()[3]) == blue


def test_loads_are_shares_of_the_claims_of_a_block():
    fig = expert_plots.expert_loads(np.array([[1, 3, 4], [2, 0, 0]]), [0, 2], 2)
    heights = [[bar.get_height() for bar in ax.patches] for ax in fig.axes]
    np.testing.assert_allclose(heights, [[12.5, 37.5, 50.0], [100, 0, 0]])
    assert colors.to_hex(fig.axes[0].patches[2].get_facecolor()) == expert_plots.NO_OP
