"""Pictures: the numbers are in them, the same numbers give the same file, and what is wrong is said."""

import json
import sys
from pathlib import Path

import pytest

from jpaged.capacity import plan_capacity
from jpaged.errors import ConfigError
from jpaged.lengths import fixed_lengths
from jpaged.plots import COLORS, GroupedBars, Lines, StackedBars, plot_capacity, save_figure
from tests.fakes import tiny_config

pytest.importorskip("matplotlib")

BARS = StackedBars(
    bars={"paged": {"tokens": 96.0, "waste": 4.0}, "max": {"waste": 80.0, "tokens": 20.0, "dust": 0.01}},
    ylabel="part of the pool, %",
    labels={"tokens": "K and V of tokens"},
)
GROUPS = GroupedBars(groups={"2": {"a": 1.0, "b": 2.0}, "4": {"b": 3.0}}, xlabel="samples", ylabel="saved, %")
OVER_TIME = Lines(series={"paged": ([0, 1, 2], [5, 7, 6])}, xlabel="time, s", ylabel="sequences", steps=True)
BY_SIZE = Lines(
    series={"swap": ([8, 16, 64], [90, 50, 20]), "recompute": ([8, 16, 64], [20, 20, 20])},
    xlabel="tokens a page",
    ylabel="milliseconds",
    log2_x=True,
    log_y=True,
)


def drawn(panel):
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    panel.draw(axes)
    return axes


def legend(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_stacked_bars_stand_on_each_other():
    axes = drawn(BARS)
    tokens, waste = axes.containers
    assert legend(axes) == ["K and V of tokens", "waste"], "what nobody could see is left out"
    assert [(bar.get_y(), bar.get_height()) for bar in tokens] == [(0, 96), (0, 20)]
    assert [(bar.get_y(), bar.get_height()) for bar in waste] == [(96, 4), (20, 80)]
    assert axes.get_ylabel() == "part of the pool, %"
    assert {text.get_text() for text in axes.texts} == {"96.0", "20.0", "80.0"}, "thin parts have no figure"


def test_grouped_bars_leave_out_what_is_missing():
    axes = drawn(GROUPS)
    assert [[bar.get_height() for bar in series] for series in axes.containers] == [[1.0], [2.0, 3.0]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4"]
    assert legend(axes) == ["a", "b"]


def test_lines_over_time_are_steps_from_zero():
    axes = drawn(OVER_TIME)
    (line,) = axes.lines
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_ydata()) == [5, 7, 6]
    assert axes.get_ylim()[0] == 0
    assert axes.get_legend() is None


def test_sizes_double_from_tick_to_tick():
    axes = drawn(BY_SIZE)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "16", "64"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len({str(line.get_marker()) for line in axes.lines}) == 2, "lines differ by more than their colour"
    assert [line.get_color() for line in axes.lines] == list(COLORS[:2])


def test_the_same_numbers_give_the_same_file_whatever_the_settings(tmp_path: Path):
    import matplotlib

    one, two = tmp_path / "one.png", tmp_path / "two.png"
    save_figure(one, BARS, GROUPS, OVER_TIME, title="a title")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "black"}):
        save_figure(two, BARS, GROUPS, OVER_TIME, title="a title")
        assert matplotlib.rcParams["font.size"] == 30, "and leaves them as they were"
    assert one.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert one.read_bytes() == two.read_bytes()


def test_a_capacity_plan_is_drawn_from_its_json(tmp_path: Path):
    plan = plan_capacity(tiny_config(), fixed_lengths(20, 30), device_bytes=4_000_000, dtype="float32")
    plot_capacity(json.loads(json.dumps(plan.as_dict())), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 20_000


@pytest.mark.parametrize("stats", [{}, {"paged": 1, "contiguous": []}, {"paged": {"name": "x"}, "contiguous": []}, []])
def test_other_statistics_are_refused(stats, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no capacity plan .*`jpaged plan --json`"):
        plot_capacity(stats, tmp_path / "plan.png")


def test_files_that_cannot_be_written_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"a.jpg', expected a name that ends in .png"):
        save_figure(tmp_path / "a.jpg", BARS)
    with pytest.raises(ConfigError, match=r"a.png cannot be written: No such file or directory"):
        save_figure(tmp_path / "missing" / "a.png", BARS)
    with pytest.raises(ConfigError, match="no panels"):
        save_figure(tmp_path / "a.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'jpaged\[plots\]'"):
        save_figure(tmp_path / "a.png", BARS)
