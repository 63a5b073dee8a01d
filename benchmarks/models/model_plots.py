"""Plots of the benchmarks of whole models, from their JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.models.model_steps import LABELS, OURS
from benchmarks.models.training import GIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Content = Mapping[str, Any]
# As in plot.py: the product's the strongest.
COLOURS = dict(zip(LABELS, ("#d55e00", "#e69f00", "#56b4e9", "#999999", "#009e73"), strict=True))
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
                axis.plot(at, list(values.values()), "o", color=COLOURS[provider], label=LABELS[provider])
                axis.plot(failed, [0] * len(failed), "x", color=COLOURS[provider])
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
                axis.barh(row, seconds, left=left, color=COLOURS[r["provider"]], alpha=shade)
                left += seconds
            axis.text(left, row, f" {r['total']:.1f} s", va="center", fontsize=8)
        axis.set_yticks(range(len(found)), [LABELS[r["provider"]] for r in found])
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
                curve["losses"], color=COLOURS[curve["provider"]], linestyle=":" if ours else "-",
                linewidth=2.2 if ours else 1.3, label=None if curve["seed"] else LABELS[curve["provider"]],
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
    return [name for name in reversed(LABELS) if any(r["provider"] == name for r in found)]
