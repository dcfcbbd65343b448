"""The style of figures: readable, the same bytes for the same data, one color for each meaning."""

import re
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
import pytest

from colossal._src.pipeline import timeline
from colossal.testing import COLORS, draw_figure, run_threads

PAGE_PX, PHONE_PX, PX_PER_POINT = 700, 348, 96 / 72
READABLE_PX, READABLE_ON_PHONE_PX = 12, 7.5
RANKS = {name: color for name, color in COLORS.items() if name.startswith("rank ")}
MEANINGS = {name: color for name, color in COLORS.items() if name not in {*RANKS, "idle", "text"}}


def draw(file: Path) -> None:
    with draw_figure(file, height=2.4, columns=2, sharey=True) as (left, right):
        left.plot([1, 2, 3], label="loss")
        left.bar([1, 2], [3, 4], color=COLORS["memory"])
        left.set_xlabel("optimizer step")
        left.set_title("title")
        left.legend()
        right.text(0.5, 0.5, "label")


@pytest.mark.slow
def test_a_figure_has_text_of_a_readable_size(tmp_path) -> None:
    draw(tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert all(f">{label}</text>" in svg for label in ("loss", "optimizer step", "title", "label"))
    width = float(re.findall(r'<svg [^>]*viewBox="0 0 ([\d.]+) ', svg, re.DOTALL)[0])
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", svg)]
    assert len(sizes) > 8
    assert width * PX_PER_POINT <= PAGE_PX, "a page does not shrink it"
    assert min(sizes) * PX_PER_POINT >= READABLE_PX
    assert min(sizes) * PHONE_PX / width >= READABLE_ON_PHONE_PX


@pytest.mark.slow
def test_a_timeline_has_text_of_a_readable_size_and_the_colors_of_figures() -> None:
    assert timeline._FONT_PX * min(1, PAGE_PX / timeline._WIDTH) >= READABLE_PX
    assert timeline._FONT_PX * PHONE_PX / timeline._WIDTH >= READABLE_ON_PHONE_PX
    meanings = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradients"}
    assert {kind: COLORS[name] for kind, name in meanings.items()} == timeline._COLORS


@pytest.mark.slow
def test_the_same_data_give_the_same_file_and_leave_the_settings(tmp_path) -> None:
    before = dict(mpl.rcParams)
    for name in ("a.svg", "b.svg"):
        draw(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert dict(mpl.rcParams) == before


def test_rank_0_writes(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    draw(tmp_path / "a.svg")
    assert not (tmp_path / "a.svg").exists()
    run_threads(draw, 1, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").exists()


def test_a_figure_that_fails_is_not_written(tmp_path) -> None:
    with pytest.raises(ValueError, match="no data"), draw_figure(tmp_path / "a.svg"):
        raise ValueError("no data")
    assert not (tmp_path / "a.svg").exists()


def channels(color: str) -> tuple[float, ...]:
    return tuple(int(color[start : start + 2], 16) / 255 for start in (1, 3, 5))


def in_dark(color: str) -> tuple[float, ...]:
    """The color as `docs/website/src/css/content.css` shows it: invert(1) hue-rotate(180deg)."""
    red, green, blue = (1 - each for each in channels(color))
    rotated = (
        -0.574 * red + 1.43 * green + 0.144 * blue,
        0.426 * red + 0.43 * green + 0.144 * blue,
        0.426 * red + 1.43 * green - 0.856 * blue,
    )
    return tuple(min(max(each, 0.0), 1.0) for each in rotated)


def luminance(color: tuple[float, ...]) -> float:
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("view", [channels, in_dark], ids=["light", "dark"])
def test_colors_have_contrast_with_the_page_and_with_text_on_them(view) -> None:
    paper, ink = view("#ffffff"), view(COLORS["text"])
    assert {name for name, color in MEANINGS.items() if contrast(view(color), paper) < 4.5} == set()
    assert {name for name, color in RANKS.items() if contrast(view(color), ink) < 4.5} == set()
    assert contrast(ink, paper) > 10


def test_a_color_has_one_meaning() -> None:
    same_pass = {("forward", "parameters"), ("backward", "gradients"), ("update", "optimizer states")}
    same_pass.add(("memory", "activations"))
    equal = {(one, other) for one, other in combinations(COLORS, 2) if COLORS[one] == COLORS[other]}
    assert equal == same_pass
