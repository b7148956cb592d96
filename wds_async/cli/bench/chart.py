"""The PNG charts of ``bench`` and ``demo`` (matplotlib, without a display)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wds_async import packages
from wds_async.cli.bench.measure import Outcome

__all__ = ["Course", "bench", "demo"]

_OURS, _THEIRS, _LOSS, _GREY = "#1a7f5a", "#b0b7bf", "#c2532b", "#59636e"
_STYLE = {
    "font.size": 13,
    "axes.titlesize": 15,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.labelcolor": _GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#d0d7de",
    "xtick.color": _GREY,
    "ytick.color": _GREY,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#eaeef2",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 2.4,
    "lines.solid_capstyle": "round",
}


@dataclass(frozen=True)
class Course:
    """The course of a training: ``rates`` (second, bytes/s read, bytes/s trained on), ``losses`` (samples seen, loss),
    ``tests`` (samples seen, accuracy from 0 to 1).
    """

    rates: list[tuple[float, float, float]]
    losses: list[tuple[int, float]]
    tests: list[tuple[int, float]]


@contextlib.contextmanager
def _figure(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Yield the axes of a figure, which is written to ``path`` at the end."""
    packages.optional("matplotlib", "a chart", "bench").use("Agg")
    pyplot = packages.optional("matplotlib.pyplot", "a chart", "bench")
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=size)
        yield axes
        figure.tight_layout(pad=2.0, h_pad=3.0, w_pad=3.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, facecolor="white")
        pyplot.close(figure)


def bench(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw throughput and cost by number of workers, one bar per library."""
    libraries = list(dict.fromkeys(outcome.job.library for outcome in outcomes))
    with _figure(path, 1, 2, (12, 5)) as axes:
        _bars(axes[0], outcomes, libraries, [outcome.rate / 1e6 for outcome in outcomes], "{:,.0f}")
        axes[0].set(title="Throughput", ylabel="MB/s")
        _bars(axes[1], outcomes, libraries, [outcome.cpu_s_per_gb for outcome in outcomes], "{:.2f}")
        axes[1].set(title="Cost", ylabel="CPU seconds per GB")
        for ax in axes:
            ax.set_xlabel("workers")
            ax.margins(y=0.15)
        if len(libraries) > 1:
            axes[0].legend()


def _bars(ax: Any, outcomes: Sequence[Outcome], libraries: list[str], heights: list[float], form: str) -> None:
    counts = list(dict.fromkeys(outcome.job.workers for outcome in outcomes))
    width = 0.7 / len(libraries)
    for outcome, height in zip(outcomes, heights, strict=True):
        place = libraries.index(outcome.job.library)
        left = counts.index(outcome.job.workers) + (place - (len(libraries) - 1) / 2) * width
        label = outcome.job.library if outcome.job.workers == counts[0] else None
        bar = ax.bar(left, height, width * 0.94, color=_colour(outcome.job.library), label=label)
        ax.bar_label(bar, [form.format(height)], padding=4, color=_GREY, fontsize=12)
    ax.set_xticks(range(len(counts)), [str(count) for count in counts])


def _colour(library: str) -> str:
    return _OURS if library == "wds_async" else _THEIRS


def demo(course: Course, outcomes: Sequence[Outcome], path: Path) -> None:
    """"""
    with _figure(path, 2, 2, (14, 9.5)) as axes:
        _training_rate(axes[0][0], course.rates)
        _learning(axes[0][1], course)
        _race(axes[1][0], outcomes)
        _costs(axes[1][1], outcomes)


def _training_rate(ax: Any, rates: Sequence[tuple[float, float, float]]) -> None:
    seconds = [at for at, _, _ in rates]
    read, used = [rate / 1e6 for _, rate, _ in rates], [rate / 1e6 for _, _, rate in rates]
    ax.fill_between(seconds, read, color=_OURS, alpha=0.12, linewidth=0)
    ax.plot(seconds, read, color=_OURS, label="read over HTTP, ahead into the window")
    ax.plot(seconds, used, color=_LOSS, label="trained on")
    ax.set(title="Throughput while training", xlabel="seconds", ylabel="MB/s")
    ax.set_ylim(0, max([*read, *used, 1.0]) * 1.25)
    ax.margins(x=0.01)
    ax.legend(loc="upper right")


def _learning(ax: Any, course: Course) -> None:
    ax.plot(*zip(*_smooth(course.losses), strict=True), color=_LOSS)
    ax.set(title="Learning curve", xlabel="samples seen", ylabel="training loss")
    ax.yaxis.label.set_color(_LOSS)
    ax.set_ylim(bottom=0)
    ax.locator_params(axis="x", nbins=5)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if not course.tests:
        return
    other = ax.twinx()
    other.grid(False)
    other.plot(*zip(*[(at, 100 * share) for at, share in course.tests], strict=True), "o-", color=_OURS)
    other.set(ylabel="test accuracy, %", ylim=(0, 104))
    other.yaxis.label.set_color(_OURS)
    at, best = course.tests[-1]
    _label(other, f"{100 * best:.1f} %", (at, 100 * best), -12, _OURS, va="top")


def _label(ax: Any, text: str, place: tuple[float, float], above: int, colour: str, va: str = "bottom") -> None:
    """Write ``text`` to the left of a point of the plot, so many printer's points above it."""
    style = {"ha": "right", "va": va, "color": colour, "weight": "bold"}
    ax.annotate(text, place, xytext=(-6, above), textcoords="offset points", **style)


def _smooth(points: Sequence[tuple[int, float]], keep: float = 0.9) -> Iterable[tuple[int, float]]:
    """Yield an exponential mean, which starts at the first value."""
    mean = points[0][1]
    for at, value in points:
        mean = keep * mean + (1 - keep) * value
        yield at, mean


def _race(ax: Any, outcomes: Sequence[Outcome]) -> None:
    longest = max(outcome.bytes for outcome in outcomes)
    for outcome in outcomes:
        at = [0.0, *(moment.at_s for moment in outcome.moments), outcome.wall_s]
        read = [0.0, *(moment.bytes / 1e9 for moment in outcome.moments), outcome.bytes / 1e9]
        ax.plot(at, read, color=_colour(outcome.job.library))
        text = f"{outcome.job.library}\n{outcome.rate / 1e6:,.0f} MB/s"
        colour = _OURS if outcome.job.library == "wds_async" else _GREY
        _label(ax, text, (at[-1], read[-1]), 10 if outcome.bytes < longest else 0, colour)
    ax.set(title="Reading alone, the same shards", xlabel="seconds", ylabel="GB read")
    ax.set_ylim(0, longest / 1e9 * 1.18)
    ax.margins(x=0.01)


def _costs(ax: Any, outcomes: Sequence[Outcome]) -> None:
    names = [outcome.job.library for outcome in outcomes]
    values = [outcome.cpu_s_per_gb for outcome in outcomes]
    bars = ax.barh(range(len(names)), values, 0.55, color=[_colour(name) for name in names])
    labels = [f"{outcome.cpu_s_per_gb:.2f} s/GB · {outcome.peak_bytes / 1e6:,.0f} MB" for outcome in outcomes]
    ax.bar_label(bars, labels, padding=6, color=_GREY)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.grid(False)
    ax.set(title="What it costs: CPU and peak memory", xlabel="CPU seconds per GB")
    ax.set_xlim(0, max(values) * 1.45)
