"""Draws the figure of the page on CPU collectives, in both languages: python docs/figures/cpu_collectives.py."""

from drawing import EMPTY, GREY, MUTED, RANKS, Drawing, tint, write_figures

from colossal.testing import COLORS

CHUNKS, STEPS = 3, 5
# What a rank does with a chunk, in the order of the steps; a number stands for the part of the tensor.
LANES = (
    ("copy part {other} to my slot", "把第 {other} 部分写入自己的槽位"),
    ("sum part {own}, put it there too", "归约第 {own} 部分，结果也写入槽位"),
    ("take part {other} from the other", "从对方的槽位取走第 {other} 部分"),
)
WORDS = {
    "rank": ("rank", "rank"),
    "step": ("step", "步"),
    "chunk": ("chunk", "块"),
    "wait": ("at each dashed line: post, then wait for all", "每条虚线处：声明本步完成，等待所有 rank"),
    "written": ("written in this step", "本步写入"),
    "slot": ("slots", "槽位"),
    "shared": ("layout of the shared memory", "共享内存的布局"),
    "counters": ("counters, calls", "计数器、操作"),
    "rings": ("rings for messages", "消息环形缓冲区"),
}
LEFT, TOP, WIDTH, HEIGHT, LANE = 258, 56, 84, 26, 32
FILLS = tuple(tint("memory", strength) for strength in (0.12, 0.26, 0.4))


def draw_rank(d: Drawing, rank: int, top: float) -> None:
    """The three lanes of a rank: a chunk moves one lane down at each step."""
    d.box(8, top - 6, LEFT + STEPS * WIDTH - 8, 3 * LANE + 6, EMPTY, stroke="none", rx=8)
    d.text(14, top + LANE + HEIGHT / 2, f"{d.word('rank')} {rank}", 14, anchor="start")
    for lane, texts in enumerate(LANES):
        y = top + lane * LANE
        d.text(LEFT - 10, y + HEIGHT / 2, texts[d.language].format(own=rank, other=1 - rank), 12.5, MUTED, "end")
        for chunk in range(CHUNKS):
            x = LEFT + (chunk + lane) * WIDTH + 8
            d.box(x, y, WIDTH - 16, HEIGHT, FILLS[chunk], f"{d.word('chunk')} {chunk + 1}", 12.5, rx=5)


def draw_steps(language: str) -> Drawing:
    """An all-reduce of two ranks in three chunks, over the steps."""
    d = Drawing(392, language, WORDS)
    tops = (TOP, TOP + 3 * LANE + 20)
    for rank, top in enumerate(tops):
        draw_rank(d, rank, top)
    bottom = tops[1] + 3 * LANE
    for step in range(STEPS):
        x = LEFT + step * WIDTH
        label = f"{d.word('step')} {step + 1}" if d.language == 0 else f"第 {step + 1} 步"
        d.text(x + WIDTH / 2, 34, label, 14)
        if step < STEPS - 1:
            d.text(x + WIDTH / 2, bottom + 16, f"{d.word('slot')} {'AB'[step % 2]}", 12.5)
            d.box(x + WIDTH, 24, 0.01, bottom, stroke=COLORS["communication"], stroke_dasharray="5 4")
    d.text(LEFT - 10, bottom + 16, d.word("written"), 12.5, MUTED, "end")
    d.text(LEFT + STEPS * WIDTH / 2, 12, d.word("wait"), 12.5, COLORS["communication"])
    draw_memory(d, bottom + 44)
    return d


def draw_memory(d: Drawing, top: float) -> None:
    """The layout of the memory of two ranks, not to scale."""
    rings = [f"{origin} → {1 - origin}" for origin in range(2)]
    slots = [f"{letter}, {d.word('rank')} {rank}" for letter in "AB" for rank in range(2)]
    d.text(14, top + 8, d.word("shared"), 13, anchor="start")
    x = 14.0
    for width, fill, text in (
        (136, GREY, d.word("counters")),
        *((64, "white", ring) for ring in rings),
        *((98, RANKS[number % 2], slot) for number, slot in enumerate(slots)),
    ):
        d.box(x, top + 22, width, 28, fill, text, 12.5, rx=3)
        x += width
    d.text(150 + 64, top + 64, d.word("rings"), 12.5, MUTED)
    d.text(150 + 128 + 196, top + 64, d.word("slot"), 12.5, MUTED)


if __name__ == "__main__":
    write_figures({"cpu_collectives_steps": draw_steps})
