"""Charts as inline SVG, coloured by the page's style sheet; the values of a mark stand in its <title>.

Reports may come from strangers, so all their text goes through `escape`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 68, 12, 16, 46


@dataclass(frozen=True)
class Series:
    """One value a layer, None where there is none. style: a CSS class, and the shape that goes with it."""

    label: str
    values: Sequence[float | None]
    style: str


def layer_chart(
    title: str,
    names: Sequence[str],
    series: Sequence[Series],
    *,
    log: bool = False,
    unit: str = "",
    line: tuple[float, str] | None = None,
    join: bool = False,
) -> Markup:
    """Marks over the layers in order. line: a horizontal line and its name. join: a stem between a layer's marks."""
    known = [value for s in series for value in s.values if value is not None] + ([line[0]] if line else [])
    scale = _log_scale(known) if log else _linear_scale(known)
    xs = [LEFT + (WIDTH - LEFT - RIGHT) * (i + 0.5) / len(names) for i in range(len(names))]
    parts = [_grid(scale, unit), _blocks(names, xs)]
    if line is not None:
        parts.append(_limit(scale.y(line[0]), line[1]))
    for index, (name, x) in enumerate(zip(names, xs, strict=True)):
        values = [(s, s.values[index]) for s in series]
        heights = [scale.y(value) for _, value in values if value is not None]
        if join and len(heights) > 1:
            parts.append(f'<line class="stem" x1="{x:.1f}" x2="{x:.1f}" y1="{min(heights):.1f}" y2="{max(heights):.1f}"/>')
        parts += [_mark(s, name, value, x, scale.y(value), unit) for s, value in values if value is not None]
    return _figure(title, [(s.label, _shape(s, 7, 7)) for s in series], "".join(parts))


@dataclass(frozen=True)
class Course:
    """Values over steps, (step, value) each. style: as of `Series`; joined: a line through them instead of marks."""

    label: str
    points: Sequence[tuple[float, float]]
    style: str
    joined: bool = False


def step_chart(
    title: str, courses: Sequence[Course], *, from_zero: bool = True, line: tuple[float, str] | None = None
) -> Markup:
    """Values over the steps of a training. line: a horizontal line and its name."""
    known = [value for course in courses for _, value in course.points] + ([line[0]] if line else [])
    scale = _linear_scale(known, from_zero)
    last = max([step for course in courses for step, _ in course.points] + [1])
    parts = [_grid(scale, ""), _steps(last)]
    if line is not None:
        parts.append(_limit(scale.y(line[0]), line[1], at_start=True))  # courses come down towards it
    for course in courses:
        places = [(_along(step, last), scale.y(value)) for step, value in course.points]
        if course.joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            parts.append(f'<polyline class="course {course.style}" points="{path}"/>')
            continue
        for (step, value), (x, y) in zip(course.points, places, strict=True):
            parts.append(_mark(Series(course.label, (), course.style), f"step {step:g}", value, x, y, ""))
    return _figure(title, [_key(course) for course in courses], "".join(parts))


def _key(course: Course) -> tuple[str, str]:
    if course.joined:
        return course.label, f'<path class="course {course.style}" d="M1 7h12"/>'
    return course.label, _shape(Series(course.label, (), course.style), 7, 7)


def _along(step: float, last: float) -> float:
    return LEFT + 8 + (WIDTH - LEFT - RIGHT - 16) * step / last


def _steps(last: float) -> str:
    """The axis of steps, with round numbers."""
    y = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>']
    for tick in _linear_scale([float(last)]).ticks:
        if tick <= last:
            parts.append(f'<text x="{_along(tick, last):.1f}" y="{y + 20}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text class="note" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    return "".join(parts)


def _limit(y: float, name: str, at_start: bool = False) -> str:
    x, anchor = (LEFT + 4, "start") if at_start else (WIDTH - RIGHT - 4, "end")
    return (
        f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="note" x="{x}" y="{y - 5:.1f}" text-anchor="{anchor}">{escape(name)}</text>'
    )


def bars(title: str, items: Sequence[tuple[str, float, str]]) -> Markup:
    """Horizontal bars, each (name, value, what stands beside it)."""
    largest, step = max([value for _, value, _ in items] + [1e-12]), 26
    left, right = 110, 90
    parts = []
    for index, (name, value, text) in enumerate(items):
        y, width = 6 + index * step, (600 - left - right) * value / largest
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="bar" x="{left}" y="{y}" width="{max(width, 1):.1f}" height="18" rx="3"/>')
        parts.append(f'<text x="{left + max(width, 1) + 6:.1f}" y="{y + 14}">{escape(text)}</text>')
    height, width = 12 + step * len(items), 600
    return Markup(
        f'<figure><figcaption>{escape(title)}</figcaption><div class="scroll"><svg class="small" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}">{"".join(parts)}</svg></div></figure>'
    )


def _figure(title: str, legend: Sequence[tuple[str, str]], body: str) -> Markup:
    """legend: labels, and their marks as SVG."""
    keys = "".join(f'<span class="key"><svg viewBox="0 0 14 14">{mark}</svg>{escape(label)}</span>' for label, mark in legend)
    return Markup(
        f'<figure><figcaption>{escape(title)}</figcaption><div class="keys">{keys}</div>'
        f'<div class="scroll"><svg class="wide" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{body}</svg></div></figure>"
    )


def _mark(series: Series, name: str, value: float, x: float, y: float, unit: str) -> str:
    return f"<g><title>{escape(name)}: {escape(series.label)} {value:.4g}{unit}</title>{_shape(series, x, y)}</g>"


def _shape(series: Series, x: float, y: float) -> str:
    """Shapes differ as well as colours."""
    match series.style:
        case "a":
            return f'<circle class="a" cx="{x:.1f}" cy="{y:.1f}" r="3.4"/>'
        case "b":
            return f'<rect class="b" x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6"/>'
        case "c":
            return f'<path class="c" d="M{x:.1f} {y - 4:.1f}l4 7h-8z"/>'
        case _:
            return f'<path class="{series.style}" d="M{x:.1f} {y - 4.5:.1f}l4 4.5l-4 4.5l-4 -4.5z"/>'


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool

    def y(self, value: float) -> float:
        """The height of a value; what lies outside the scale is put on its edge."""
        inside = min(max(value, self.low), self.high)
        low, high, at = (math.log10(v) for v in (self.low, self.high, inside)) if self.log else (self.low, self.high, inside)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (at - low) / (high - low)


_LARGEST = 1e300  # the end of every scale: percentages of what lies above overflow


def _log_scale(values: Sequence[float]) -> _Scale:
    """Whole decades. Zeros have no logarithm: they are drawn on the lower edge."""
    positive = [min(value, _LARGEST) for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    low -= (low == high) or any(value <= 0 for value in values)
    step = max(1, math.ceil((high - low) / 6))
    ticks = tuple(10.0**power for power in range(high, low - 1, -step))
    return _Scale(10.0**low, 10.0**high, ticks, True)


def _linear_scale(values: Sequence[float], from_zero: bool = True) -> _Scale:
    """From 0, or the lowest round number below it, to a round number; not from_zero: from one below the least value."""
    values = [max(-_LARGEST, min(value, _LARGEST)) for value in values]
    zero = [0.0] if from_zero else []
    low, high = min([*zero, *values]), max([*zero, *values])
    raw = (high - low if high - low > 1e-9 else 1.0) / 5  # all alike: any scale will do
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step), math.ceil(max(high, step) / step * 0.9999)
    last = max(last, first + 1)
    return _Scale(first * step, last * step, tuple(step * i for i in range(first, last + 1)), False)


def _grid(scale: _Scale, unit: str) -> str:
    parts = []
    for tick in scale.ticks:
        y = scale.y(tick)
        text = f"1e{round(math.log10(tick))}" if scale.log and (tick < 1e-3 or tick > 1e4) else f"{tick:g}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}{unit}</text>')
    return "".join(parts)


def _blocks(names: Sequence[str], xs: Sequence[float]) -> str:
    """The blocks' numbers under the layers, as many as there is room for."""
    starts: list[tuple[str, float]] = []
    for name, x in zip(names, xs, strict=True):
        found = re.search(r"\.(\d+)(?:\.|$)", str(name))
        number = found[1] if found else str(name)
        if not starts or starts[-1][0] != number:
            starts.append((number, x))
    every = max(1, math.ceil(len(starts) / 16))
    y = HEIGHT - BOTTOM
    parts = [f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>']
    for number, x in starts[::every]:
        parts.append(f'<text x="{x:.1f}" y="{y + 20}" text-anchor="middle">{escape(number)}</text>')
    parts.append(f'<text class="note" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">block</text>')
    return "".join(parts)
