"""Plots of results, from their JSON alone: a PNG and an SVG beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.providers import COPY, MODEL_LABELS, NAMES, OURS, label
from benchmarks.records import Measurement, Run, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.tables import device_figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that stay apart for colour-blind readers (Okabe and Ito), the product's the strongest.
COLOURS = dict(zip(NAMES, ("#d55e00", "#999999", "#56b4e9", "#009e73", "#cc79a7"), strict=True))
PANEL_INCHES = (6.4, 4.2)


def plot(path: Path) -> list[Path]:
    """Draw what a JSON file holds; returns the files written, of the same name with .png and .svg.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the file holds no results of a known form, or nothing to draw.
    """
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    data = json.loads(path.read_text())
    if isinstance(data, dict) and "benchmark" in data:
        return _plot_models(path, data, figure)
    run = read(path)
    _draw(run, figure, path)
    seen = (run.environments("forward", "backward") or [run.environment])[0]
    figure.suptitle(
        f"{run.op} on {seen.gpu} ({seen.date[:10]}): liger-aot {seen.liger_aot}, torch {seen.torch}, "
        f"triton {seen.triton}, Liger {seen.liger_kernel}, QuACK {seen.quack}",
        fontsize=10,
    )
    return _save(figure, path.with_suffix(""), run.op)


def _plot_models(path: Path, data: dict[str, Any], figure: Figure) -> list[Path]:
    name, seen = data["benchmark"], data["environment"]
    if name not in DRAWN:
        raise ValueError(f"{path}: no figure for the benchmark {name!r}: there are {', '.join(DRAWN)}")
    DRAWN[name](data, figure)
    figure.suptitle(
        f"{name.replace('_', ' ')} on {seen['gpu']} ({seen['date'][:10]}): liger-aot {seen['liger_aot']}, torch "
        f"{seen['torch']}, triton {seen['triton']}, Liger {seen['liger_kernel']}",
        fontsize=10,
    )
    return _save(figure, path.with_suffix(""), name)


def _save(figure: Figure, stem: Path, salt: str) -> list[Path]:
    import matplotlib

    written = []
    # No dates and no random ids: the same JSON gives the same files.
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            target = stem.with_name(stem.name + suffix)
            figure.savefig(target, dpi=120, metadata=metadata)
            written.append(target)
    return written


def _draw(run: Run, figure: Figure, path: Path) -> None:
    from matplotlib.patches import Patch

    panels = _panels(run)
    if not panels:
        raise ValueError(f"{path}: nothing to draw")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    width, height = PANEL_INCHES
    figure.set_size_inches(width * columns, height * rows)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, draw in zip(axes, panels, strict=False):
        draw(axis)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    handles = [Patch(color=COLOURS.get(name), label=label(name)) for name in _providers(run.measurements)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))


def _panels(run: Run) -> list[Callable[[Axes], None]]:
    panels: list[Callable[[Axes], None]] = []
    for direction, dtype in device_figures(run):
        found = run.select(direction=direction, dtype=dtype)
        by_variant = {
            v: [m for m in found if m.variant == v] for v in dict.fromkeys(m.variant for m in found)
        }
        if all(_swept(of_one) for of_one in by_variant.values()):
            for variant, of_one in by_variant.items():
                title = ", ".join(filter(None, (direction, variant, dtype)))
                panels.append(partial(_curves, found=of_one, title=title))
        else:
            panels.append(partial(_points, found=found, title=f"{direction}, {dtype}"))
    for prefix, field, title in (
        ("host_", "host_us", "host time a small call, us"),
        ("cold_", "median_ms", "first call in a fresh process, ms"),
    ):
        found = [m for m in run.measurements if m.direction.startswith(prefix) and m.status == "ok"]
        if found:
            panels.append(partial(_bars, found=found, field=field, title=title))
    return panels


def _swept(found: list[Measurement]) -> bool:
    """Whether row length is all that differs between several problems."""
    lengths = [m.shape[-1] for m in found if m.provider == COPY]
    return len(lengths) > 1 and len(set(lengths)) == len(lengths)


def _curves(axis: Axes, found: list[Measurement], title: str) -> None:
    """Fraction of the copy over row length; a cross on the axis where a provider failed."""
    _fractions(axis, found, title, lambda m: m.shape[-1], linestyle="-")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("row length n")


def _points(axis: Axes, found: list[Measurement], title: str) -> None:
    """Fraction of the copy at each of several unlike problems."""
    problems = list(dict.fromkeys(m.point for m in found))
    _fractions(axis, found, title, lambda m: problems.index(m.point), linestyle="none")
    axis.set_xticks(range(len(problems)), problems, rotation=20, ha="right", fontsize=7)


def _fractions(
    axis: Axes, found: list[Measurement], title: str, place: Callable[[Measurement], int], linestyle: str
) -> None:
    copies = [m.bandwidth_gb_s for m in found if m.provider == COPY and m.bandwidth_gb_s is not None]
    for name in _providers(found):
        own = [m for m in found if m.provider == name]
        good = [(place(m), m.fraction) for m in own if m.fraction is not None]
        style: dict[str, Any] = {"color": COLOURS.get(name), "zorder": 3 if name == NAMES[0] else 2}
        axis.plot(
            [x for x, _ in good],
            [fraction for _, fraction in good],
            marker="o",
            markersize=4,
            linewidth=2.2 if name == NAMES[0] else 1.3,
            linestyle=linestyle,
            **style,
        )
        failed = [place(m) for m in own if m.status == "error"]
        axis.plot(failed, [0.02] * len(failed), marker="x", linestyle="none", **style)
    axis.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_ylim(0, 1.15)
    axis.set_ylabel(f"fraction of copy ({min(copies):.0f}-{max(copies):.0f} GB/s)")
    axis.set_title(title)
    axis.grid(alpha=0.3)


def _bars(axis: Axes, found: list[Measurement], field: str, title: str) -> None:
    """A group of horizontal bars for each direction, one bar a provider, on a logarithmic axis."""
    places, values, colours, ticks = [], [], [], {}
    place = 0.0
    for direction in dict.fromkeys(m.direction for m in found):
        group = [
            m for name in _providers(found) for m in found if (m.direction, m.provider) == (direction, name)
        ]
        ticks[direction.partition("_")[2].replace("_", " ")] = place + (len(group) - 1) / 2
        for m in group:
            places.append(place)
            values.append(float(getattr(m, field)))
            colours.append(COLOURS.get(m.provider))
            place += 1
        place += 0.8
    bars = axis.barh(places, values, 0.95, color=colours)
    axis.bar_label(bars, [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in values], fontsize=7, padding=2)
    axis.set_xscale("log")
    # Under a tenth of a microsecond or millisecond is nothing: it must not stretch the axis.
    axis.set_xlim(0.1, 3 * max(values))
    axis.set_yticks(list(ticks.values()), list(ticks))
    axis.invert_yaxis()
    axis.set_title(title)


def _providers(found: Sequence[Measurement]) -> list[str]:
    """Providers that occur, the product first and the others in their usual order."""
    occurring = dict.fromkeys(m.provider for m in found if m.provider != COPY)
    return sorted(occurring, key=lambda name: NAMES.index(name) if name in NAMES else len(NAMES))


# ---- Whole models ----

Content = Mapping[str, Any]
MODEL_COLOURS = dict(zip(MODEL_LABELS, ("#d55e00", "#e69f00", "#56b4e9", "#999999", "#009e73"), strict=True))
GIB = 1 << 30
PHASE_SHADES = (0.25, 0.45, 0.7, 1.0)


def training(content: Content, figure: Figure) -> None:
    """Speed over Transformers' and peak memory, a column a model; a cross where a provider failed."""
    results = content["results"]
    models = list(dict.fromkeys(r["point"]["model"] for r in results))
    figure.set_size_inches(5.6 * len(models), 8.0)
    axes = figure.subplots(2, len(models), squeeze=False)
    for column, model in enumerate(models):
        found = [r for r in results if r["point"]["model"] == model]
        points = list(dict.fromkeys(map(_named, found)))
        plain = {
            _named(r): r["tokens_per_second"]
            for r in found
            if r["provider"] == "transformers" and not r["failed"]
        }
        for provider in _order(found):
            own = {_named(r): r for r in found if r["provider"] == provider}
            good = {name: r for name, r in own.items() if not r["failed"]}
            speeds = {n: r["tokens_per_second"] / plain[n] for n, r in good.items() if n in plain}
            memory = {n: r["peak_bytes"] / GIB for n, r in good.items() if r["peak_bytes"]}
            failed = [points.index(name) for name in own if name not in good]
            for axis, values in zip(axes[:, column], (speeds, memory), strict=True):
                at = [points.index(name) for name in values]
                axis.plot(
                    at,
                    list(values.values()),
                    "o",
                    color=MODEL_COLOURS[provider],
                    label=MODEL_LABELS[provider],
                )
                axis.plot(failed, [0] * len(failed), "x", color=MODEL_COLOURS[provider])
        axes[0, column].axhline(1.0, color="black", linewidth=0.8, linestyle="--")
        axes[0, column].set_title(model)
        for axis in axes[:, column]:
            axis.set_xticks(range(len(points)), points, rotation=60, ha="right", fontsize=7)
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("tokens a second, of Transformers'")
    axes[1, 0].set_ylabel("most memory of a step, GiB")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))


def first_step(content: Content, figure: Figure) -> None:
    """A panel a goal, a bar a provider, in phases."""
    goals = list(dict.fromkeys(r["goal"] for r in content["results"]))
    figure.set_size_inches(6.4 * len(goals), 3.2)
    for axis, goal in zip(figure.subplots(1, len(goals), squeeze=False)[0], goals, strict=True):
        found = [r for r in content["results"] if r["goal"] == goal and not r["failed"]]
        for row, r in enumerate(found):
            left = 0.0
            for shade, seconds in zip(PHASE_SHADES, r["phases"], strict=True):
                axis.barh(row, seconds, left=left, color=MODEL_COLOURS[r["provider"]], alpha=shade)
                left += seconds
            axis.text(left, row, f" {r['total']:.1f} s", va="center", fontsize=8)
        axis.set_yticks(range(len(found)), [MODEL_LABELS[r["provider"]] for r in found])
        axis.set_xlim(0, 1.15 * max((r["total"] for r in found), default=1.0))
        axis.invert_yaxis()
        axis.set_title(f"to the end of the first {goal}, s" if goal != "token" else "to the first token, s")
    figure.supxlabel(f"from light to dark: {', '.join(content['phases'])}", fontsize=8)


def loss_curves(content: Content, figure: Figure) -> None:
    """A panel a dtype: every seed with both; the verdict in its title."""
    figure.set_size_inches(6.4 * len(content["verdicts"]), 4.2)
    axes = figure.subplots(1, len(content["verdicts"]), squeeze=False)[0]
    for axis, said in zip(axes, content["verdicts"], strict=True):
        for curve in content["curves"]:
            if curve["dtype"] != said["dtype"]:
                continue
            ours = curve["provider"] == OURS
            axis.plot(
                curve["losses"], color=MODEL_COLOURS[curve["provider"]], linestyle=":" if ours else "-",
                linewidth=2.2 if ours else 1.3, label=None if curve["seed"] else MODEL_LABELS[curve["provider"]],
            )  # fmt: skip
        largest = max(map(abs, said["differences"]))
        axis.set_title(
            f"{said['dtype']}: final losses differ by {largest:.1e},\nthose of seeds by {said['noise']:.1e}",
            fontsize=10,
        )
        axis.set_xlabel("step")
        axis.set_ylabel("loss")
        axis.grid(alpha=0.3)
        axis.legend()


DRAWN: dict[str, Callable[[Content, Figure], None]] = {
    "training": training,
    "first_step": first_step,
    "loss_curves": loss_curves,
}


def _named(result: Content) -> str:
    point = result["point"]
    return f"{point['batch']} x {point['tokens']} {point['optimizer']}"


def _order(found: list[Any]) -> list[str]:
    """Providers that occur; the product's is drawn last, over the others."""
    return [name for name in reversed(MODEL_LABELS) if any(r["provider"] == name for r in found)]
