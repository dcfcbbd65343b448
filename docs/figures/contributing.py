"""Draws the figures of the contributing pages, in both languages: python docs/figures/contributing.py."""

from itertools import pairwise

from concepts import ACCENT, EMPTY, INK, LANGUAGES, MUTED, RANKS, SOURCE, Drawing

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
LEFT, TOP, WIDTH, HEIGHT, GAP = 14, 52, 158, 38, 36


def draw_step(language: str) -> Drawing:
    """One row for each line of the loop, one column for each floor; the ranks meet in one place only."""
    d = Drawing(966, 404, language)
    for column, words in enumerate(COLUMNS):
        x = LEFT + column * (WIDTH + GAP)
        d.box(x - 6, 34, WIDTH + 12, 356, EMPTY, stroke="none", rx=8)
        d.text(x + WIDTH / 2, 18, words[d.language], 15, INK)
    for row, cells in enumerate(STEP):
        y = TOP + row * 56
        visited = [column for column, cell in enumerate(cells) if cell]
        for column in visited:
            cell, x = cells[column], LEFT + column * (WIDTH + GAP)
            d.box(
                x, y, WIDTH, HEIGHT, "white" if column == 0 else RANKS[0] if column < len(cells) - 1 else RANKS[2], rx=6
            )
            d.text(x + WIDTH / 2, y + HEIGHT / 2, cell if isinstance(cell, str) else cell[d.language], 13)
        for start, end in pairwise(visited):
            d.arrow(
                LEFT + start * (WIDTH + GAP) + WIDTH + 2, y + HEIGHT / 2, LEFT + end * (WIDTH + GAP) - 3, y + HEIGHT / 2
            )
    talk_y, drop_y = TOP + 2 * 56 + HEIGHT + 9, TOP + 4 * 56 + HEIGHT + 9
    d.text(LEFT + 4 * (WIDTH + GAP) + WIDTH / 2, talk_y, TALK[d.language], 12.5, ACCENT)
    d.text(LEFT + 3 * (WIDTH + GAP) + WIDTH / 2, drop_y, DROP[d.language], 12.5, MUTED)
    return d


def main() -> None:
    """Write the figure in every language."""
    for language in LANGUAGES:
        path = SOURCE / language / "images" / "contributing_step.svg"
        path.write_text(draw_step(language).svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
