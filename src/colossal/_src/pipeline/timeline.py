"""When each rank did what, as a picture and as a trace."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from colossal._src.pipeline.schedule import Pass, bubble_fraction

_COLORS = {"F": "#2f6db3", "B": "#c2410c", "I": "#c2410c", "W": "#8a6d00"}  # those of `colossal.testing.COLORS`
_LABELS = {"F": "forward", "B": "backward", "I": "backward to inputs", "W": "gradients of weights"}
_WIDTH, _ROW, _LEFT, _TOP = 640, 34, 56, 30
_FONT_PX, _DIGIT_PX = 14, 8.5  # 12 pixels or more on a page, 7.6 on a phone


@final
@dataclass(frozen=True)
class Timeline:
    """The passes of one step, of all ranks.

    Args:
        passes: The passes, simulated or measured.

    Example:
        >>> from colossal.pipeline import StagePlacement, Timeline, one_forward_one_backward, simulate
        >>> placement = StagePlacement(2)
        >>> timeline = Timeline(tuple(simulate(one_forward_one_backward(placement, 7), placement)))
        >>> round(timeline.bubble, 3), timeline.duration
        (0.125, 24.0)
    """

    passes: tuple[Pass, ...]

    @property
    def duration(self) -> float:
        """From the beginning of the first pass to the end of the last."""
        return max(each.end for each in self.passes) - min(each.begin for each in self.passes)

    @property
    def bubble(self) -> float:
        """The fraction of the time in which ranks are idle."""
        return bubble_fraction(list(self.passes))

    def to_svg(self) -> str:
        """Draw a row for each rank, time from left to right.

        Returns:
            The picture; numbers in it are micro-batches, and stages beyond the first of a rank are lighter.
        """
        begin, scale = min(each.begin for each in self.passes), (_WIDTH - _LEFT - 8) / self.duration
        num_ranks = 1 + max(each.rank for each in self.passes)
        stages = {rank: [each.action.stage for each in self.passes if each.rank == rank] for rank in range(num_ranks)}
        bars = []
        for each in self.passes:
            x, width = _LEFT + (each.begin - begin) * scale, max(each.duration * scale, 0.5)
            is_first = each.action.stage == min(stages[each.rank])
            y, opacity, text = _TOP + each.rank * _ROW, 1.0 if is_first else 0.45, "#fff" if is_first else "#1f2933"
            bars.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 6}" fill-opacity="{opacity}" '
                f'fill="{_COLORS[each.action.kind]}" stroke="#fff" stroke-width="0.5">'
                f"<title>{each.action!r}</title></rect>"
            )
            number = str(each.action.microbatch)
            if width >= _DIGIT_PX * len(number):
                bars.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 19}" text-anchor="middle" fill="{text}">{number}</text>'
                )
        ranks = [f'<text x="4" y="{_TOP + rank * _ROW + 19}">rank {rank}</text>' for rank in range(num_ranks)]
        kinds = sorted({each.action.kind for each in self.passes}, key=list(_COLORS).index)
        legend = [
            f'<rect x="{_LEFT + place * 180}" y="6" width="12" height="12" fill="{_COLORS[kind]}"/>'
            f'<text x="{_LEFT + place * 180 + 17}" y="17">{_LABELS[kind]}</text>'
            for place, kind in enumerate(kinds)
        ]
        height = _TOP + num_ranks * _ROW + 4
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" font-family="sans-serif" font-size="{_FONT_PX}">'
            f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{"".join([*legend, *ranks, *bars])}</svg>'
        )

    def to_chrome_trace(self) -> str:
        """Write the events in the format that chrome://tracing and Perfetto read.

        Returns:
            JSON; times are in microseconds, a thread for each rank.
        """
        begin = min(each.begin for each in self.passes)
        events = [
            {
                "name": repr(each.action),
                "cat": _LABELS[each.action.kind],
                "ph": "X",
                "ts": (each.begin - begin) * 1e6,
                "dur": each.duration * 1e6,
                "pid": 0,
                "tid": each.rank,
            }
            for each in self.passes
        ]
        return json.dumps({"traceEvents": events})

    def save(self, paths: Iterable[str | Path]) -> None:
        """Write pictures and traces.

        Args:
            paths: Files that end in ``.svg`` or ``.json``.
        """
        for path in map(Path, paths):
            path.write_text(self.to_svg() if path.suffix == ".svg" else self.to_chrome_trace(), encoding="utf-8")
