"""One style for all figures: a color has one meaning, text is readable at the width of a page and of a phone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from colossal._src.testing.expected_error import is_rank_0

COLORS: Mapping[str, str] = MappingProxyType(
    {
        "forward": "#2f6db3",
        "backward": "#c2410c",
        "weight gradients": "#8a6d00",
        "communication": "#0f766e",
        "update": "#2e7d32",
        "memory": "#7048b6",
        "idle": "#dde2e7",
        "text": "#1f2933",
        # What a step keeps has the color of the pass that reads or makes it.
        "parameters": "#2f6db3",
        "gradients": "#c2410c",
        "optimizer states": "#2e7d32",
        "activations": "#7048b6",
        # Ranks have light colors, for areas with text on them.
        "rank 0": "#9ecae1",
        "rank 1": "#fdae6b",
        "rank 2": "#a1d99b",
        "rank 3": "#cbb3e0",
        "rank 4": "#e8d48a",
        "rank 5": "#f4b6c2",
        "rank 6": "#9ad9d2",
        "rank 7": "#c9c2b8",
    }
)
"""The color of each meaning, the same in all figures; ``rank 0`` to ``rank 7`` are for ranks only."""

# Series that mean none of these, such as two options that are compared.
_SERIES = (COLORS["text"], "#b0286e", "#5b6770", "#a16207")

# [Note: sizes]
# A page shows a figure in its own width, 6.4 inches of 96 px, and a phone in 348 px. Text of 10.5 points is 14 px high
# on the page, and 8 px on the phone.
_WIDTH, _POINTS = 6.4, 10.5

_SIZES = ("axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize", "font.size")
_INKS = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_STYLE = {
    **dict.fromkeys(_SIZES, _POINTS),
    **dict.fromkeys(_INKS, COLORS["text"]),
    "svg.fonttype": "none",
    "svg.hashsalt": "colossal",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "patch.edgecolor": "white",
    "patch.force_edgecolor": True,
}


@contextmanager
def draw_figure(
    file: str | Path, height: float = 3.2, rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[Any]:
    """Draw a figure in the style of all figures; on exit, rank 0 writes it. The same data give the same file.

    Text stays text in the file, so that labels can be translated and found. Matplotlib is imported here only.

    Args:
        file: The SVG file.
        height: In inches; all figures are 6.4 inches wide.
        rows: Number of panels from top to bottom; panels next to each other are small on a phone.
        columns: Number of panels from left to right.
        **options: Those of `matplotlib.figure.Figure.subplots`.

    Yields:
        The axes of the panel, or an array of them. Colors come from `COLORS`; what has no meaning there takes the next
        color by itself.

    Example:
        >>> import tempfile
        >>> from colossal.testing import COLORS, draw_figure
        >>> with tempfile.TemporaryDirectory() as folder, draw_figure(f"{folder}/loss.svg", height=2.4) as axes:
        ...     line = axes.plot([2.3, 1.1, 0.7], color=COLORS["forward"], label="loss")
        ...     axes.set_xlabel("step").get_text()
        'step'
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = _STYLE | {"axes.prop_cycle": cycler(color=_SERIES)}
    with rc_context(style):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        yield figure.subplots(rows, columns, **options)
        if is_rank_0():
            figure.savefig(file, format="svg", metadata={"Date": None})
