"""Charts as one picture, by matplotlib. Importing this module loads it."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator, NullLocator

from vllm_kvpp.planner.charts import Chart, Line

INCHES = (15.0, 5.2)
DOTS_PER_INCH = 110
# Of Okabe and Ito's palette, told apart also by those who see fewer colours; the same name has the same one.
COLOURS = {"KVPP": "#0072B2", "DCP": "#D55E00", "without KVPP": "#666666"}
OTHER_COLOURS = ("#0072B2", "#009E73")
# Text stays text, and two pictures of one plan are equal.
SETTINGS: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "vllm-kvpp", "font.family": "sans-serif"}
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def draw(charts: Sequence[Chart], heading: str, form: str) -> bytes:
    """Draw the charts side by side, as `svg` or `png`."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=INCHES, layout="constrained")
        figure.suptitle(heading, fontsize=11, parse_math=False)
        for axes, chart in zip(figure.subplots(1, len(charts)), charts, strict=True):
            _draw_chart(axes, chart)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=form, dpi=DOTS_PER_INCH, metadata=NO_METADATA if form == "svg" else None)
    return buffer.getvalue()


def _draw_chart(axes: Axes, chart: Chart) -> None:
    axes.set_title(f"{chart.title}\n{chart.remark}" if chart.lines else chart.title, fontsize=10)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    if not chart.lines:
        axes.set_xticks([])
        axes.set_yticks([])
        axes.text(0.5, 0.5, chart.remark, transform=axes.transAxes, ha="center", va="center", wrap=True)
        return
    for index, line in enumerate(chart.lines):
        _draw_line(axes, line, COLOURS.get(line.name, OTHER_COLOURS[index % len(OTHER_COLOURS)]))
    _scale(axes, chart)
    asked = next((line.asked for line in chart.lines if line.asked is not None), None)
    if asked is not None:
        axes.axvline(asked[0], color="#999999", linestyle=":", linewidth=1, zorder=0, label="as asked")
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=8, loc="best")


def _draw_line(axes: Axes, line: Line, colour: str) -> None:
    x, y = zip(*line.points, strict=True)
    axes.plot(x, y, color=colour, marker="o", markersize=3.5, linewidth=1.5, label=line.name)
    if line.asked is None:
        return
    axes.plot(*line.asked, color=colour, marker="o", markersize=9, markerfacecolor="none", markeredgewidth=1.8)
    offset: dict[str, Any] = {"xytext": (8, -4), "textcoords": "offset points", "va": "top"}
    axes.annotate(_shorten(line.asked[1]), line.asked, color=colour, fontsize=9, **offset)


def _scale(axes: Axes, chart: Chart) -> None:
    ticks = sorted({x for line in chart.lines for x, _ in line.points})
    if chart.has_log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}Ki" if x >= 1024 else f"{x:g}"))
    elif len(ticks) <= 8:
        axes.set_xticks(ticks)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_minor_locator(NullLocator())
    if chart.has_log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _shorten(value: float) -> str:
    return f"{value / 1e6:.2f}M" if value >= 1e6 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
