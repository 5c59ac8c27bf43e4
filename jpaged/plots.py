"""Pictures of saved statistics: panels of bars and lines, drawn into a PNG file by matplotlib (the extra `plots`).

Panels hold plain numbers, as they come out of JSON. Colours are those of Okabe and Ito, which colour-blind readers tell
apart; lines differ in their markers too, and stacked parts carry their figures. The same numbers give the same file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jpaged.errors import ConfigError

# Reference: Okabe and Ito, Color Universal Design, https://jfly.uni-koeln.de/color/
COLORS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_MARKERS: Final = "osD^vPX*"
_DASHES: Final = ("-", (0, (6, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1.5, 1.5)))
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
_DPI: Final = 144
_PANEL_INCHES: Final = (5.6, 4.2)


def _figure(value: float) -> str:
    """Example:
    >>> _figure(0.123), _figure(12.34), _figure(1234.5)
    ('0.12', '12.3', '1,234')
    """
    return f"{value:,.{0 if value >= 100 else 1 if value >= 1 else 2}f}"


@dataclass(frozen=True, kw_only=True)
class StackedBars:
    """Bars that are divided into parts, such as memory by what is in it.

    Attributes:
      bars: bar -> part -> value; a part that a bar lacks is 0. Parts that are in no bar a 500th of the highest bar are
        too thin to be seen and left out.
      ylabel: what is shown, with its unit.
      title: of the panel.
      labels: part -> its name in the legend, where that is another one; it also fixes the order, from below.
    """

    bars: Mapping[str, Mapping[str, float]]
    ylabel: str
    title: str = ""
    labels: Mapping[str, str] | None = None

    def draw(self, axes: Any) -> None:
        names = list(self.bars)
        labels = self.labels or {}
        parts = dict.fromkeys([*labels, *(part for bar in self.bars.values() for part in bar)])
        bottoms = [0.0] * len(names)
        highest = max((sum(bar.values()) for bar in self.bars.values()), default=0.0)
        for index, part in enumerate(parts):  # a part has the same colour in every picture with these labels
            values = [float(bar.get(part, 0.0)) for bar in self.bars.values()]
            if max(values, default=0.0) * 500 < highest or not any(values):
                continue
            color, label = COLORS[index % len(COLORS)], labels.get(part, part)
            axes.bar(names, values, bottom=bottoms, width=0.7, color=color, edgecolor="white", label=label)
            for x, (value, bottom) in enumerate(zip(values, bottoms, strict=True)):
                if value > 0.045 * highest:
                    dark = color in ("#0072B2", "#D55E00", "#009E73")
                    axes.text(
                        x,
                        bottom + value / 2,
                        _figure(value),
                        ha="center",
                        va="center",
                        size=8,
                        color="w" if dark else "k",
                    )
            bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, highest or 1)
        axes.set_ylabel(self.ylabel)
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, columnspacing=1.2, handlelength=1.2, fontsize=7
        )


@dataclass(frozen=True, kw_only=True)
class GroupedBars:
    """Bars side by side, in groups.

    Attributes:
      groups: group, on the x axis -> series, in the legend -> value; a series that a group lacks is left out there.
      ylabel: what is shown, with its unit.
      xlabel: what the groups are.
      title: of the panel.
    """

    groups: Mapping[str, Mapping[str, float]]
    ylabel: str
    xlabel: str = ""
    title: str = ""

    def draw(self, axes: Any) -> None:
        series = list(dict.fromkeys(name for group in self.groups.values() for name in group))
        width = 0.8 / max(len(series), 1)
        for index, name in enumerate(series):
            places = [
                i + (index - (len(series) - 1) / 2) * width for i, g in enumerate(self.groups.values()) if name in g
            ]
            values = [group[name] for group in self.groups.values() if name in group]
            bars = axes.bar(places, values, width=0.92 * width, color=COLORS[index % len(COLORS)], label=name)
            axes.bar_label(bars, fmt=_figure, size=7, padding=1)
        axes.set_xticks(range(len(self.groups)), list(self.groups))
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        axes.set_xlabel(self.xlabel)
        axes.set_ylabel(self.ylabel)
        if len(series) > 1:
            axes.legend()


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Lines: something over time, or over sizes that double.

    Attributes:
      series: line -> (x values, y values).
      xlabel, ylabel: what is shown, with units.
      title: of the panel.
      log2_x: x doubles from tick to tick, and each point has a marker.
      log_y: y is logarithmic.
      steps: a value holds until the next one, as counts over time do.
    """

    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    xlabel: str
    ylabel: str
    title: str = ""
    log2_x: bool = False
    log_y: bool = False
    steps: bool = False

    def draw(self, axes: Any) -> None:
        if self.log2_x:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for xs, _ in self.series.values() for x in xs})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        if self.log_y:
            axes.set_yscale("log")
            axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            axes.yaxis.minorticks_off()
        for index, (name, (xs, ys)) in enumerate(self.series.items()):
            marker = _MARKERS[index % len(_MARKERS)] if self.log2_x else None
            style: dict[str, Any] = {"drawstyle": "steps-post"} if self.steps else {}
            if not self.log2_x:
                style["linestyle"] = _DASHES[index % len(_DASHES)]
            axes.plot(xs, ys, color=COLORS[index % len(COLORS)], marker=marker, lw=1.6, ms=4.5, label=name, **style)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
        if not self.log_y:
            axes.set_ylim(bottom=0)
        axes.set_xlabel(self.xlabel)
        axes.set_ylabel(self.ylabel)
        if len(self.series) > 1:
            axes.legend()


Panel = StackedBars | GroupedBars | Lines


def save_figure(path: str | Path, *panels: Panel, title: str = "") -> None:
    """Draws panels into a PNG file, two beside each other.

    Args:
      path: ends in .png; the folder exists.
      panels: at least one.
      title: above all of them.

    Raises:
      ConfigError: matplotlib is not installed, another kind of file, or it cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ConfigError(f"the picture is {str(path)!r}, expected a name that ends in .png")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"pictures need matplotlib: pip install 'jpaged[plots]' ({error})") from error
    if not panels:
        raise ConfigError("the picture has no panels, expected at least one")
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    # Nothing of the user's own settings, so that the same numbers give the same file.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        width, height = _PANEL_INCHES
        figure = Figure(figsize=(width * columns, height * rows + 0.35 * bool(title)), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # type: ignore[union-attr]
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            axes.set_title(panel.title)
            panel.draw(axes)
        if title:
            figure.suptitle(title, x=0.01, ha="left", size=11)
        try:
            figure.savefig(path, dpi=_DPI, metadata={"Software": None})
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


CAUSES: Final = {
    "tokens": "tokens",
    "partly_filled": "partly filled pages",
    "null_page": "null page",
    "not_yet_used": "reserved, not used yet",
    "internal": "reserved, never used",
    "rounding": "rounded to a power of two",
}


def plot_capacity(stats: Mapping[str, Any], path: str | Path) -> None:
    """The picture of a capacity plan: the pool by cause, and what the page size does.

    Args:
      stats: what `CapacityPlan.as_dict` gives, or the JSON of `jpaged plan --json`.
      path: see `save_figure`.

    Raises:
      ConfigError: `stats` lacks something, or see `save_figure`.
    """
    try:
        schemes = [stats["paged"], *stats["contiguous"]]
        bars = {
            scheme["name"].replace(" ", "\n"): {cause: 100 * scheme["shares"][cause] for cause in CAUSES}
            for scheme in schemes
        }
        rows = stats["page_sizes"]
        sizes = [row["page_size"] for row in rows]
        at_once = {
            "steady state": (sizes, [row["sequences"] for row in rows]),
            "all at the end of their lives": (sizes, [row["sequences_at_end"] for row in rows]),
        }
        waste = {
            "steady state": (sizes, [100 * row["wasted_fraction"] for row in rows]),
            "at the end of each request": (sizes, [100 * row["final_wasted_fraction"] for row in rows]),
        }
        # JSON has texts for keys.
        short = [{int(tokens): count for tokens, count in row["short_sequences"].items()} for row in rows]
        counts = {f"{n} tokens each": (sizes, [row[n] for row in short]) for n in (short[0] if short else ())}
        title = f"{stats['source']}: {stats['pool_bytes'] / 1e9:,.1f} GB of K and V in {stats['kv_dtype']}"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the statistics are no capacity plan ({type(error).__name__}: {error}); expected what "
            "`jpaged plan --json` prints"
        ) from error
    pages = {"xlabel": "tokens a page", "log2_x": True}
    save_figure(
        path,
        StackedBars(bars=bars, ylabel="part of the pool, %", title="What is in the memory", labels=CAUSES),
        Lines(series=at_once, ylabel="sequences at once", title="This workload in the same memory", **pages),
        Lines(series=waste, ylabel="empty part of the pages in use, %", title="Waste by page size", **pages),
        Lines(series=counts, ylabel="sequences at once", title="Short sequences", log_y=True, **pages),
        title=title,
    )
