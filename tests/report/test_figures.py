"""Figures draw the numbers of the records, whole and apart."""

import matplotlib.pyplot as plt
import pytest

from made_records import throughput, training
from packmamba.report import figures
from packmamba.report.figures import training_figures


@pytest.fixture
def drawn(monkeypatch):
    """Canvas and caption of each figure by name."""
    found = {}
    monkeypatch.setattr(figures, "finish", lambda fig, name, caption: found.update({name: (fig, caption)}))
    yield found
    plt.close("all")


def test_time_in_learning_curves_is_at_the_speed_timed_in_turns(drawn):
    trained = [training(arm) for arm in ("single", "padded")]
    training_figures([*trained, throughput("single", 100.0), throughput("padded", 200.0)])
    by_time = drawn["learning-curves"][0].axes[1]
    assert [list(line.get_xdata()) for line in by_time.lines] == [[5.0, 10.0], [2.5, 5.0]]
    training_figures([*trained, throughput("single", 100.0)])
    assert len(drawn["learning-curves"][0].axes) == 1, "runs of their own may have shared a machine"


def test_nothing_drawn_is_cut_and_no_panel_is_empty(drawn):
    arms = [f"mine a_long_key_of_a_grid={value},another_key_of_it={10 * value}" for value in range(9)]
    records = [training(arm) for arm in arms]
    for record in records:
        record["curves"]["loss_by_position"][1]["end"] = 2**31  # the axis ends
    training_figures(records)
    assert drawn["loss-by-position"][0].axes[0].get_xlim()[1] < 100
    for fig, _ in drawn.values():
        fig.canvas.draw()
        for legend in fig.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= fig.bbox.width
        assert all(ax.lines or ax.patches for ax in fig.axes)
    assert len(drawn["loss-by-position"][0].axes) == 1, "nothing is compared"
