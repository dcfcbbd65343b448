"""Draws the schematic figures of the Booster pages, in both languages: `python docs/figures/booster.py`."""

import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

SOURCE = Path(__file__).resolve().parent.parent / "source"
FONT = "'Noto Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', Arial, sans-serif"
INK, SOFT, LINE = "#1f2933", "#52606d", "#7b8794"
BLUE, GREEN, ORANGE, GREY = "#dbeafe", "#d7f0dd", "#fde6c8", "#eef1f4"

# Every text of every figure: English, Chinese.
WORDS = {
    "model": ("model", "模型"),
    "optimizer": ("optimizer", "优化器"),
    "criterion": ("criterion", "损失函数"),
    "dataloader": ("dataloader", "数据加载器"),
    "lr_scheduler": ("lr_scheduler", "学习率调度器"),
    "your_parts": ("your parts", "你的组件"),
    "boosted_parts": ("boosted parts", "改造后的组件"),
    "plugin": ("plugin", "插件"),
    "plugin_note": ("how the model is spread,", "模型如何分布，"),
    "plugin_note_2": ("what the ranks exchange", "各 rank 交换什么"),
    "precision": ("mixed precision", "混合精度"),
    "precision_note": ("what runs in 16 bits", "哪些计算用 16 位"),
    "verbs": ("the same verbs under every plugin", "任何插件下都是同一组方法"),
    "rank": ("rank", "rank"),
    "no_sync": ("inside no_sync: each rank keeps its own gradients", "no_sync 之内：各 rank 各自累加梯度"),
    "outside": ("outside: synchronize", "之外：同步"),
    "micro": ("micro-batch", "微批次"),
    "average": ("all-reduce: average of the sums", "all-reduce：对累加和求平均"),
    "step": ("optimizer.step()", "optimizer.step()"),
    "weight_part": ("weight, rows", "权重，行"),
    "bias": ("full bias", "完整的偏置"),
    "own_squares": ("squares of its shard", "本地分片的平方和"),
    "add": ("all-reduce adds the squares of the shards", "all-reduce 把各分片的平方和相加"),
    "once": ("+ bias squares, once; then the root", "再加偏置的平方和（只加一次），然后开方"),
    "same_norm": ("the same norm on every rank", "每个 rank 得到相同的范数"),
    "forward": ("forward", "前向"),
    "backward": ("backward", "反向"),
    "update": ("update", "更新"),
    "parameters": ("parameters", "参数"),
    "products": ("matrix products", "矩阵乘"),
    "logits": ("logits", "logits"),
    "loss": ("loss", "损失"),
    "scaled": ("loss x scale", "损失 x 缩放因子"),
    "gradients": ("gradients", "梯度"),
    "unscale": ("÷ scale, check for inf", "÷ 缩放因子，检查 inf"),
    "state": ("optimizer state", "优化器状态"),
    "half": ("16 bits", "16 位"),
    "full": ("float32", "float32"),
    "only_fp16": ("fp16 only", "仅 fp16"),
    "one": ("one process", "单进程"),
    "many": ("several processes", "多进程"),
    "fits all": ("everything fits", "全部放得下"),
    "fits states": ("the model fits,\nits states do not", "放得下模型，\n放不下优化器状态"),
    "fits none": ("the model\ndoes not fit", "放不下模型"),
    "fits less": ("it does not fit", "放不下"),
    "goal": ("what matters\nmost", "最看重\n什么"),
    "simple": ("simplicity", "简单"),
    "speed": ("speed", "速度"),
    "memory": ("memory", "显存"),
}
PLUGINS = {
    "single": ("Booster()", GREY),
    "ddp": ("DDP", BLUE),
    "zero": ("ZeRO", "#d5e8f5"),
    "fsdp": ("FSDP", GREEN),
    "hybrid": ("Hybrid", ORANGE),
    "gemini": ("Gemini", "#e6dcf5"),
}


class Figure:
    """Collects shapes; `text` writes the documents.

    Args:
        width: In pixels.
        height: In pixels.
        language: 0 for English, 1 for Chinese.
    """

    def __init__(self, width: int, height: int, language: int) -> None:
        self.size, self.language, self.parts = (width, height), language, []

    def word(self, key: str) -> str:
        """Return the text of a key in the language of the figure."""
        return WORDS[key][self.language]

    def write(self, x: float, y: float, text: str, size: int = 14, **style: str) -> None:
        """Write text around a middle point."""
        fill, weight = style.get("fill", INK), style.get("weight", "400")
        family = "monospace" if style.get("mono") else FONT
        self.parts.append(
            f'<text x="{x:g}" y="{y + 0.36 * size:g}" font-size="{size}" font-family="{family}" font-weight="{weight}" '
            f'fill="{fill}" text-anchor="{style.get("anchor", "middle")}">'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", size: int = 14) -> None:
        """Draw a box with text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{LINE}"/>'
        )
        if text:
            self.write(x + width / 2, y + height / 2, text, size)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line with a head at its end."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        style = f'fill="none" stroke="{SOFT}" stroke-width="1.5" marker-end="url(#head)"'
        self.parts.append(f'<path d="M {path}" {style}/>')

    def text(self) -> str:
        """Return the SVG document."""
        width, height = self.size
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M 0 0 L 10 5 L 0 10 z" fill="{SOFT}"/></marker>'
        )
        size = f'width="{width}" height="{height}"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size}>'
        paper = f'<rect {size} fill="#ffffff"/>'
        return "\n".join([start, f"<defs>{head}</defs>", paper, *self.parts, "</svg>\n"])


def booster_overview(language: int) -> Figure:
    """The parts, the Booster with its two choices, and the boosted parts with their verbs."""
    figure = Figure(760, 330, language)
    keys = ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")
    for left, title, fill in ((20, "your_parts", GREY), (590, "boosted_parts", BLUE)):
        figure.write(left + 75, 24, figure.word(title), 15, weight="600")
        for row, key in enumerate(keys):
            figure.box(left, 44 + 40 * row, 150, 32, fill, figure.word(key))
    figure.box(250, 44, 260, 192, "#ffffff")
    figure.write(380, 64, "Booster.boost", 15, mono="1", weight="600")
    figure.box(268, 84, 224, 76, GREEN)
    figure.write(380, 99, figure.word("plugin"), 14, weight="600")
    figure.write(380, 121, figure.word("plugin_note"), 13, fill=SOFT)
    figure.write(380, 142, figure.word("plugin_note_2"), 13, fill=SOFT)
    figure.box(268, 170, 224, 54, ORANGE)
    figure.write(380, 186, figure.word("precision"), 14, weight="600")
    figure.write(380, 208, figure.word("precision_note"), 13, fill=SOFT)
    figure.arrow((176, 140), (244, 140))
    figure.arrow((516, 140), (584, 140))
    figure.box(20, 258, 720, 56, "#ffffff")
    figure.write(380, 274, figure.word("verbs"), 13, fill=SOFT)
    figure.write(380, 297, "backward · clip_grad_by_norm · step · zero_grad · no_sync · save_… · load_…", 13, mono="1")
    return figure


def accumulation_timeline(language: int) -> Figure:
    """Two ranks, four micro-batches; the ranks talk after the fourth."""
    figure = Figure(780, 226, language)
    figure.box(84, 16, 376, 162, "#f7f9fb")
    figure.write(272, 34, figure.word("no_sync"), 13, fill=SOFT)
    figure.write(532, 34, figure.word("outside"), 13, fill=SOFT)
    for rank in range(2):
        y = 52 + 62 * rank
        figure.write(44, y + 24, f"{figure.word('rank')} {rank}", 14)
        for number, x in enumerate((94, 216, 338, 476)):
            figure.box(x, y, 112, 48, BLUE if x < 460 else GREEN)  # noqa: PLR2004 (right of the frame)
            figure.write(x + 56, y + 16, f"{figure.word('micro')} {number + 1}", 13)
            figure.write(x + 56, y + 34, "grad +=" if number else "grad =", 12, mono="1", fill=SOFT)
        figure.arrow((590, y + 24), (630, y + 24))
        figure.box(634, y, 130, 48, ORANGE, figure.word("step"), 13)
    figure.arrow((532, 190), (532, 166))
    figure.write(532, 204, figure.word("average"), 13)
    return figure


def clipping_sharded(language: int) -> Figure:
    """Each rank's part of a weight, the common bias, and how the norm comes about."""
    figure = Figure(760, 246, language)
    for rank in range(2):
        y = 20 + 84 * rank
        rows = ("0-15", "16-31")[rank]
        figure.write(44, y + 32, f"{figure.word('rank')} {rank}", 14)
        figure.box(84, y, 104, 64, GREY, figure.word("bias"), 13)
        figure.box(196, y, 150, 64, BLUE, f"{figure.word('weight_part')} {rows}")
        figure.arrow((350, y + 32), (396, y + 32))
        figure.box(400, y + 10, 160, 44, BLUE, figure.word("own_squares"), 13)
        figure.arrow((564, y + 32), (616, 86 + 16 * rank))
    figure.box(620, 70, 124, 48, GREEN, "all-reduce", 14)
    figure.write(380, 204, figure.word("add"), 13, fill=SOFT)
    figure.write(380, 226, f"{figure.word('once')}  →  {figure.word('same_norm')}", 13, fill=SOFT)
    return figure


def mixed_precision_types(language: int) -> Figure:
    """The tensors of a step, in order, colored by type."""
    figure = Figure(760, 284, language)
    rows = (
        (56, "forward", (("parameters", BLUE), ("products", ORANGE), ("logits", ORANGE), ("loss", BLUE))),
        (136, "backward", (("scaled", BLUE), ("products", ORANGE), ("gradients", BLUE), ("unscale", BLUE))),
        (218, "update", (("state", BLUE), ("parameters", BLUE))),
    )
    for y, title, boxes in rows:
        figure.write(50, y + 22, figure.word(title), 14, weight="600")
        for column, (key, fill) in enumerate(boxes):
            x = 100 + 164 * column
            figure.box(x, y, 138, 44, fill, figure.word(key), 13)
            if column:
                figure.arrow((x - 24, y + 22), (x - 3, y + 22))
            if key in {"scaled", "unscale"}:
                figure.write(x + 40, y + 55, figure.word("only_fp16"), 12, fill=SOFT)
    figure.arrow((661, 183), (661, 240), (404, 240))
    figure.box(500, 16, 18, 18, BLUE)
    figure.write(526, 25, figure.word("full"), 13, anchor="start")
    figure.box(612, 16, 18, 18, ORANGE)
    figure.write(638, 25, figure.word("half"), 13, anchor="start")
    return figure


def booster_plugins_choice(language: int) -> Figure:
    """The plugin to take, by what fits on a device and what matters most: a row for each goal."""
    figure = Figure(700, 264, language)
    plugins = tomllib.loads((SOURCE.parent / "plugins.toml").read_text(encoding="utf-8"))["plugin"]
    columns = (("one", "all"), ("one", "none"), ("many", "all"), ("many", "states"), ("many", "none"))
    for first, count, key in ((0, 2, "one"), (2, 3, "many")):
        left = 112 + 118 * first
        figure.box(left, 16, 118 * count - 8, 32, GREY, figure.word(key))
    for column, (workers, fits) in enumerate(columns):
        left = 112 + 118 * column
        title = figure.word("fits less" if (workers, fits) == ("one", "none") else f"fits {fits}").split("\n")
        for row, line in enumerate(title):
            figure.write(left + 55, 74 + 18 * row - 9 * (len(title) - 1), line, 13, fill=SOFT)
        for row, goal in enumerate(("simple", "speed", "memory")):
            asked = {"workers": workers, "fits": fits, "goal": goal}
            key = next(one["key"] for one in plugins if all(answer in one[name] for name, answer in asked.items()))
            name, fill = PLUGINS[key]
            figure.box(left, 102 + 52 * row, 110, 40, fill, name, 15)
    for row, goal in enumerate(("simple", "speed", "memory")):
        figure.write(52, 122 + 52 * row, figure.word(goal), 14, weight="600")
    for row, line in enumerate(figure.word("goal").split("\n")):
        figure.write(52, 65 + 18 * row, line, 13, fill=SOFT)
    return figure


def main() -> None:
    """Write all figures in both languages."""
    drawn = (booster_overview, accumulation_timeline, clipping_sharded, mixed_precision_types, booster_plugins_choice)
    for draw in drawn:
        for language, folder in enumerate(("en", "zh-Hans")):
            target = SOURCE / folder / "images" / f"{draw.__name__}.svg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(draw(language).text(), encoding="utf-8")


if __name__ == "__main__":
    main()
