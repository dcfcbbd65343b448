"""Draws the schematic figures of the Booster pages, in both languages: `python docs/figures/booster.py`."""

import tomllib

from drawing import EMPTY, GREY, INK, MUTED, SOURCE, Drawing, tint, write_figures

# Types of fewer bits are darker.
FULL, HALF = "#f2f2f2", "#d4d4d4"

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
    "unscale": ("÷ scale, find inf", "÷ 缩放因子，检查 inf"),
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
# The color is that of what a plugin shards or moves.
PLUGINS = {
    "single": ("Booster()", EMPTY),
    "ddp": ("DDP", "white"),
    "zero": ("ZeRO", tint("optimizer states")),
    "fsdp": ("FSDP", tint("parameters")),
    "hybrid": ("Hybrid", tint("communication")),
    "gemini": ("Gemini", tint("memory")),
}
MONO = {"font_family": "monospace"}
BOLD = {"font_weight": "600"}


def booster_overview(language: str) -> Drawing:
    """The parts, the Booster with its two choices, and the boosted parts with their verbs."""
    d = Drawing(330, language, WORDS)
    keys = ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")
    for left, title, fill in ((10, "your_parts", EMPTY), (540, "boosted_parts", GREY)):
        d.text(left + 70, 24, d.word(title), 15, **BOLD)
        for row, key in enumerate(keys):
            d.box(left, 44 + 40 * row, 140, 32, fill, d.word(key), 14, rx=6)
    d.box(222, 44, 246, 192, rx=6)
    d.text(345, 64, "Booster.boost", 15, **BOLD, **MONO)
    notes = (
        (84, 78, "communication", ("plugin", "plugin_note", "plugin_note_2")),
        (170, 56, "text", ("precision", "precision_note")),
    )
    for top, height, meaning, lines in notes:
        d.box(236, top, 218, height, tint(meaning, 0.12), rx=6)
        for row, key in enumerate(lines):
            fill, style = (MUTED, {}) if row else (INK, BOLD)
            d.text(345, top + 17 + 22 * row, d.word(key), 13.5, fill, **style)
    d.arrow((156, 140), (216, 140))
    d.arrow((474, 140), (534, 140))
    d.box(10, 258, 670, 60, rx=6)
    d.text(345, 275, d.word("verbs"), 13, MUTED)
    d.text(345, 300, "backward · clip_grad_by_norm · step · zero_grad · no_sync · save_… · load_…", 13, **MONO)
    return d


def accumulation_timeline(language: str) -> Drawing:
    """Two ranks, four micro-batches; the ranks communicate after the fourth."""
    d = Drawing(226, language, WORDS)
    d.box(62, 12, 356, 166, "#fafbfc", rx=6)
    d.text(240, 30, d.word("no_sync"), 12.5, MUTED)
    d.text(430, 30, d.word("outside"), 12.5, MUTED, "start")
    for rank in range(2):
        y = 50 + 62 * rank
        d.text(30, y + 24, f"{d.word('rank')} {rank}", 14)
        for number, x in enumerate((70, 187, 304, 432)):
            d.box(x, y, 106, 48, tint("gradients"), rx=6)
            d.text(x + 53, y + 15, f"{d.word('micro')} {number + 1}")
            d.text(x + 53, y + 34, "grad +=" if number else "grad =", 12.5, MUTED, **MONO)
        d.arrow((540, y + 24), (554, y + 24))
        d.box(557, y, 126, 48, tint("update"), d.word("step"), rx=6)
    d.arrow((485, 196), (485, 164))
    d.box(365, 196, 240, 26, tint("communication"), d.word("average"), rx=6)
    return d


def clipping_sharded(language: str) -> Drawing:
    """Each rank's shard of a weight's gradient, the bias that all have, and how the norm comes about."""
    d = Drawing(246, language, WORDS)
    for rank in range(2):
        y = 20 + 84 * rank
        rows = ("0-15", "16-31")[rank]
        d.text(30, y + 32, f"{d.word('rank')} {rank}", 14)
        d.box(62, y, 80, 64, EMPTY, d.word("bias"), rx=6)
        d.box(148, y, 150, 64, tint("gradients"), f"{d.word('weight_part')} {rows}", rx=6)
        d.arrow((302, y + 32), (342, y + 32))
        d.box(346, y + 10, 160, 44, tint("gradients"), d.word("own_squares"), rx=6)
        d.arrow((510, y + 32), (568, 86 + 16 * rank))
    d.box(572, 70, 108, 48, tint("communication"), "all-reduce", 14, rx=6)
    d.text(345, 204, d.word("add"), 13, MUTED)
    d.text(345, 226, f"{d.word('once')}  →  {d.word('same_norm')}", 12.5, MUTED)
    return d


def mixed_precision_types(language: str) -> Drawing:
    """The tensors of a step, in order, darker with fewer bits."""
    d = Drawing(284, language, WORDS)
    rows = (
        (56, "forward", (("parameters", FULL), ("products", HALF), ("logits", HALF), ("loss", FULL))),
        (136, "backward", (("scaled", FULL), ("products", HALF), ("gradients", FULL), ("unscale", FULL))),
        (218, "update", (("state", FULL), ("parameters", FULL))),
    )
    for y, title, boxes in rows:
        d.text(40, y + 22, d.word(title), 14, **BOLD)
        for column, (key, fill) in enumerate(boxes):
            x = 84 + 152 * column
            d.box(x, y, 130, 44, fill, d.word(key), 12.5, rx=6)
            if column:
                d.arrow((x - 20, y + 22), (x - 3, y + 22))
            if key in {"scaled", "unscale"}:
                d.text(x + 36, y + 54, d.word("only_fp16"), 12.5, MUTED)
    d.arrow((620, 183), (620, 240), (369, 240))
    for x, key, fill in ((440, "full", FULL), (560, "half", HALF)):
        d.box(x, 16, 18, 18, fill, rx=3)
        d.text(x + 26, 25, d.word(key), 13, anchor="start")
    return d


def booster_plugins_choice(language: str) -> Drawing:
    """The plugin to take, by what fits on a device and what matters most: a row for each goal."""
    d = Drawing(264, language, WORDS)
    plugins = tomllib.loads((SOURCE.parent / "plugins.toml").read_text(encoding="utf-8"))["plugin"]
    columns = (("one", "all"), ("one", "none"), ("many", "all"), ("many", "states"), ("many", "none"))
    for first, count, key in ((0, 2, "one"), (2, 3, "many")):
        d.box(96 + 119 * first, 16, 119 * count - 8, 32, EMPTY, d.word(key), 14, rx=6)
    for column, (workers, fits) in enumerate(columns):
        left = 96 + 119 * column
        title = d.word("fits less" if (workers, fits) == ("one", "none") else f"fits {fits}").split("\n")
        for row, line in enumerate(title):
            d.text(left + 55, 74 + 18 * row - 9 * (len(title) - 1), line, 12.5, MUTED)
        for row, goal in enumerate(("simple", "speed", "memory")):
            asked = {"workers": workers, "fits": fits, "goal": goal}
            key = next(one["key"] for one in plugins if all(answer in one[name] for name, answer in asked.items()))
            name, fill = PLUGINS[key]
            d.box(left, 102 + 52 * row, 111, 40, fill, name, 15, rx=6)
    for row, goal in enumerate(("simple", "speed", "memory")):
        d.text(46, 122 + 52 * row, d.word(goal), 14, **BOLD)
    for row, line in enumerate(d.word("goal").split("\n")):
        d.text(46, 65 + 18 * row, line, 12.5, MUTED)
    return d


FIGURES = (booster_overview, accumulation_timeline, clipping_sharded, mixed_precision_types, booster_plugins_choice)

if __name__ == "__main__":
    write_figures({draw.__name__: draw for draw in FIGURES})
