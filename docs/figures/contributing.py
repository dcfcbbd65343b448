"""Draws the figures of the contributing pages, in both languages: python docs/figures/contributing.py."""

from itertools import pairwise

from drawing import EMPTY, GREY, Drawing, tint, write_figures

COLUMNS = (
    ("your loop", "你的循环"),
    ("booster", "booster"),
    ("interface", "interface"),
    ("amp", "amp"),
    ("torch", "torch"),
)
# A line of the training loop, and what it passes through on each floor, from the top down.
STEP = (
    ("model(x)", "", "ModelWrapper", "Autocast", ("DDP: forward", "DDP：前向")),
    ("criterion(out, y)", "", "", "Autocast", ("loss", "损失")),
    ("booster.backward", "Booster", "OptimizerWrapper", "scale", ("autograd", "自动求导")),
    ("clip_grad_by_norm", "", "OptimizerWrapper", "unscale", ("one norm, one factor", "统一的范数与系数")),
    ("optimizer.step", "", "OptimizerWrapper", "step", ("update", "更新参数")),
    ("optimizer.zero_grad", "", "OptimizerWrapper", "discard", ("forget", "清除梯度")),
)
TALK = ("all-reduce over dp", "在 dp 轴上 all-reduce")
DROP = ("overflow: no update", "溢出：不更新")
LEFTS, WIDTHS = (10, 166, 254, 394, 536), (138, 70, 122, 124, 146)
TOP, HEIGHT = 52, 38


def draw_step(language: str) -> Drawing:
    """One row for each line of the loop, one column for each floor; the ranks communicate in one place only."""
    d = Drawing(404, language, {})
    for left, width, words in zip(LEFTS, WIDTHS, COLUMNS, strict=True):
        d.box(left - 5, 34, width + 10, 356, EMPTY, stroke="none", rx=8)
        d.text(left + width / 2, 18, words[d.language], 14)
    for row, cells in enumerate(STEP):
        y = TOP + row * 56
        visited = [column for column, cell in enumerate(cells) if cell]
        for column in visited:
            cell = cells[column]
            fill = "white" if column == 0 else GREY
            words = cell if isinstance(cell, str) else cell[d.language]
            d.box(LEFTS[column], y, WIDTHS[column], HEIGHT, fill, words, 12.5, rx=6)
        for start, end in pairwise(visited):
            d.arrow((LEFTS[start] + WIDTHS[start] + 2, y + HEIGHT / 2), (LEFTS[end] - 3, y + HEIGHT / 2))
    for column, row, words, meaning in ((4, 2, TALK, "communication"), (3, 4, DROP, "update")):
        y = TOP + row * 56 + HEIGHT + 9
        d.box(LEFTS[column] - 5, y - 8, WIDTHS[column] + 10, 16, tint(meaning), words[d.language], 12, stroke="none")
    return d


if __name__ == "__main__":
    write_figures({"contributing_step": draw_step})
