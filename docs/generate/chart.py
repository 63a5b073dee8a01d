"""A run's device figures as one SVG: the fraction of the copy at each point, a panel a direction and dtype.

It is written by hand, not drawn by matplotlib as the figures beside the results are, because the pages must come out
the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.plot import COLOURS
from benchmarks.providers import COPY, NAMES, label
from benchmarks.records import Measurement, Run
from benchmarks.tables import device_figures

WIDTH, PLOT, LEFT, RIGHT, TOP, LEGEND = 760, 220, 44, 16, 28, 26
HIGHEST = 1.1  # fraction of the copy
STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)


def svg(run: Run) -> str:
    """Of a run that has device figures."""
    figures = device_figures(run)
    longest = max(len(m.point) for m in run.measurements)
    panel = TOP + PLOT + 30 + round(3.2 * longest)  # labels are turned by 30 degrees
    height = LEGEND + panel * len(figures)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_legend([name for name in NAMES if run.select(provider=name)]),
    ]
    for i, (direction, dtype) in enumerate(figures):
        found = run.select(direction=direction, dtype=dtype)
        parts += [f'<g transform="translate(0 {LEGEND + i * panel})">', *_panel(found), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _legend(names: Sequence[str]) -> list[str]:
    return [
        f'<circle cx="{LEFT + i * 140 + 5}" cy="13" r="4" fill="{COLOURS[name]}"/>'
        f'<text x="{LEFT + i * 140 + 14}" y="17">{escape(label(name))}</text>'
        for i, name in enumerate(names)
    ]


def _panel(found: Sequence[Measurement]) -> list[str]:
    points = list(dict.fromkeys(m.point for m in found))
    step = (WIDTH - LEFT - RIGHT) / len(points)
    x = {point: LEFT + (i + 0.5) * step for i, point in enumerate(points)}

    def y(fraction: float) -> float:
        return TOP + PLOT * (1 - min(fraction, HIGHEST) / HIGHEST)

    title = f"{found[0].direction}, {found[0].dtype}: fraction of the copy of as many bytes"
    parts = [f'<text x="{LEFT}" y="18" font-size="13">{title}</text>']
    for at in STEPS:
        stroke = "black" if at == 1 else "#ddd"
        parts.append(
            f'<path d="M{LEFT} {y(at):.1f}H{WIDTH - RIGHT}" stroke="{stroke}"/>'
            f'<text x="{LEFT - 6}" y="{y(at) + 4:.1f}" text-anchor="end">{at:.2f}</text>'
        )
    for point in points:
        where = f'x="{x[point]:.1f}" y="{TOP + PLOT + 14}"'
        turn = f'transform="rotate(-30 {x[point]:.1f} {TOP + PLOT + 14})"'
        parts.append(f'<text {where} {turn} text-anchor="end">{escape(point)}</text>')
    for name in reversed(NAMES):  # the product last, on top
        own = [m for m in found if m.provider == name]
        good = [(x[m.point], y(m.fraction)) for m in own if m.fraction is not None]
        line = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in good) if _one_kind(own) and good else ""
        style = f'stroke="{COLOURS[name]}" fill="none" stroke-width="{2.5 if name == NAMES[0] else 1.3}"'
        parts += [f'<path d="{line}" {style}/>'] if line else []
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{COLOURS[name]}"/>' for a, b in good]
        failed = [x[m.point] for m in own if m.status == "error"]
        parts += [f'<path d="M{a - 4:.1f} {y(0) - 10:.1f}l8 8m0 -8l-8 8" {style}/>' for a in failed]
    return parts


def _one_kind(found: Sequence[Measurement]) -> bool:
    """Whether row length is all that differs: then a line between the points means something."""
    return (
        len({(m.variant, len(m.shape)) for m in found if m.provider != COPY}) == 1
        and len(found[0].shape) == 2
    )
