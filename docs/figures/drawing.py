"""What the schematic figures share: shapes, fonts, and the colors that figures of data have as well."""

from collections.abc import Callable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

from colossal.testing import COLORS

SOURCE = Path(__file__).resolve().parents[1] / "source"
LANGUAGES = ("en", "zh-Hans")

# A page has room for 692 pixels on a desktop: a wider figure would have smaller text than it says.
WIDTH = 690
INK, MUTED, LINE, EMPTY, GREY = COLORS["text"], "#52606d", "#8a97a3", "#f3f5f7", COLORS["idle"]
RANKS = tuple(COLORS[f"rank {rank}"] for rank in range(4))
FONT = "'DejaVu Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', Helvetica, Arial, sans-serif"


def tint(meaning: str, strength: float = 0.2) -> str:
    """Return a color of `COLORS` mixed with white, for areas with text on them."""
    values = (int(COLORS[meaning][start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (value - 255) * strength):02x}" for value in values)


class Drawing:
    """An SVG under construction, as wide as a page.

    Args:
        height: In pixels.
        language: One of `LANGUAGES`.
        words: The labels by name, each in all languages.
    """

    def __init__(self, height: float, language: str, words: Mapping[str, tuple[str, ...]]) -> None:
        self.height, self.language, self.words = height, LANGUAGES.index(language), words
        self.parts: list[str] = []

    def word(self, name: str) -> str:
        """Return a label in this figure's language."""
        return self.words[name][self.language]

    def text(self, x: float, y: float, words: str, size: float = 13, fill: str = INK, anchor: str = "middle",
             **more: str) -> None:  # fmt: skip
        """Write words whose vertical middle is about `y`; further keywords become attributes."""
        self.parts.append(
            f'<text x="{x:g}" y="{y + size * 0.36:g}" font-size="{size:g}" fill="{fill}" '
            f'text-anchor="{anchor}"{_attributes(more)}>{escape(words)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str = "white", words: str = "",
            size: float = 13, **more: object) -> None:  # fmt: skip
        """Draw a rectangle with words in its middle; further keywords become attributes."""
        style = {"stroke": LINE, "stroke_width": 1} | more
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{_attributes(style)}/>'
        )
        if words:
            self.text(x + width / 2, y + height / 2, words, size)

    def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
        """Draw a line with a head at its end, or at both ends."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self.parts.append(
            f'<path d="M {path}" fill="none" stroke="{MUTED}" stroke-width="1.5" marker-end="url(#head)"{start}/>'
        )

    def svg(self) -> str:
        """Return the file's content, on white, which the website turns into the color of its page."""
        size = f'width="{WIDTH}" height="{self.height:g}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:g}" {size} '
            f'font-family="{FONT}">\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>\n'
            f'<rect {size} fill="white"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def write_figures(figures: Mapping[str, Callable[[str], Drawing]]) -> None:
    """Write figures by name, in every language. The same script gives the same files."""
    for language in LANGUAGES:
        for name, draw in figures.items():
            path = SOURCE / language / "images" / f"{name}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(draw(language).svg(), encoding="utf-8")


def _attributes(values: Mapping[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in values.items())
