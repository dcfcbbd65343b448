"""Draws the schematic figures of the concept pages, in both languages: python docs/figures/concepts.py."""

from typing import Any

from drawing import EMPTY, GREY, INK, MUTED, RANKS, Drawing, tint, write_figures

LABELS = {
    "host": ("host and port", "主机与端口"),
    "node": ("node", "节点"),
    "gpu": ("GPU", "GPU"),
    "rank": ("rank", "rank"),
    "default group": ("default group, world size 8", "默认进程组，world size 为 8"),
    "even group": ("even group, size 4: rank in it", "偶数进程组，大小为 4：组内 rank"),
    "data": ("data", "数据并行"),
    "tensor": ("tensor", "张量并行"),
    "pipeline": ("pipeline", "流水线并行"),
    "sequence": ("sequence", "序列并行"),
    "zero": ("ZeRO stage 3", "ZeRO 第 3 阶段"),
    "batch": ("batch", "批次"),
    "batch rows": ("rows: samples, columns: positions", "行：样本，列：位置"),
    "layers": ("layers", "层"),
    "device": ("device", "设备"),
    "columns": ("by columns: gather the shards", "按列切分：收集各分片"),
    "rows": ("by rows: add the partial sums", "按行切分：累加部分和"),
    "both": ("on both devices", "两台设备都有"),
    "planned": ("planned", "计划中"),
    "here": ("here now", "已可用"),
}
STEPS = (
    ("launch", "connect the ranks", "连接各 rank"),
    ("build", "model, optimizer, data", "模型、优化器、数据"),
    ("plugin", "parallelism, precision", "并行方案、精度"),
    ("boost", "make them parallel", "改造为并行组件"),
    ("train", "forward, backward, step", "前向、反向、更新"),
    ("save", "once for all ranks", "所有 rank 只存一份"),
)
FLOORS = (
    ("booster, cli, legacy", "one interface, plugins, the older API", "统一接口、插件、旧版 API", "inference"),
    ("shardformer, pipeline, zero, checkpoint_io", "independent of each other", "各方法互不依赖", ""),
    ("nn, amp, interface", "layers, optimizers, loss scaling", "层、优化器、损失缩放", ""),
    ("kernel, tensor, lazy", "layouts, plans, fast arithmetic", "布局、切分方案、高性能算子", ""),
    ("comm", "collectives with gradients, counted", "带梯度、可计量的集合通信", ""),
    ("cluster, accelerator", "launch, mesh, devices", "启动、设备网格、设备", ""),
    ("errors, logging", "used everywhere", "处处使用", ""),
)


def draw_world(language: str) -> Drawing:
    """Two nodes with four processes each, and the group of the even ones."""
    d = Drawing(300, language, LABELS)
    member = tint("communication", 0.3)
    d.box(6, 12, 678, 276, rx=10, stroke_dasharray="5 4")
    d.text(18, 32, d.word("default group"), 13, MUTED, "start")
    for node in range(2):
        left = 16 + node * 334
        d.box(left, 52, 324, 150, EMPTY, rx=8)
        d.text(left + 12, 74, f"{d.word('node')} {node}", 14, INK, "start")
        if node == 0:
            d.box(left + 196, 60, 120, 26, "white", d.word("host"), rx=4)
        for gpu in range(4):
            rank, x = 4 * node + gpu, left + 10 + gpu * 77
            is_even = rank % 2 == 0
            d.box(x, 98, 72, 88, member if is_even else "white", rx=6)
            d.text(x + 36, 124, f"{d.word('rank')} {rank}", 15)
            d.text(x + 36, 158, f"{d.word('gpu')} {gpu}", 13, MUTED)
            if is_even:
                d.arrow((x + 36, 188), (x + 36, 222))
                d.box(x + 14, 224, 44, 28, member, str(rank // 2), 15, rx=4)
    d.text(345, 272, d.word("even group"), 13, MUTED)
    return d


def _collectives() -> list[tuple[str, list[list[str]], list[list[str]]]]:
    """Name, memory of the ranks before, and after; a cell is "A0" (rank A's part 0), "S0" (a sum) or empty."""
    full = [[f"{rank}{part}" for part in range(4)] for rank in "ABCD"]
    sums = [f"S{part}" for part in range(4)]
    none = ["", "", "", ""]
    one_each = [[row[0], "", "", ""] for row in full]
    first = [full[0], none, none, none]
    own = [["" if part != rank else sums[part] for part in range(4)] for rank in range(4)]
    transposed = [list(column) for column in zip(*full, strict=True)]
    return [
        ("broadcast", first, [full[0]] * 4),
        ("scatter", first, [[cell, "", "", ""] for cell in full[0]]),
        ("gather", one_each, [transposed[0], none, none, none]),
        ("all-gather", one_each, [transposed[0]] * 4),
        ("reduce", full, [sums, none, none, none]),
        ("all-reduce", full, [sums] * 4),
        ("reduce-scatter", full, own),
        ("all-to-all", full, transposed),
    ]


def _memory(d: Drawing, x: float, y: float, rows: list[list[str]], cell: float = 26) -> None:
    for r, row in enumerate(rows):
        for c, name in enumerate(row):
            fill = EMPTY if not name else GREY if name[0] == "S" else RANKS["ABCD".index(name[0])]
            d.box(x + c * cell, y + r * (cell + 4), cell, cell, fill, name.replace("S", "Σ"), 12)


def draw_collectives(language: str) -> Drawing:
    """Eight collectives among four ranks, before and after."""
    d = Drawing(700, language, LABELS)
    for index, (name, before, after) in enumerate(_collectives()):
        column, row = index % 2, index // 2
        x, y = 12 + column * 350, 20 + row * 170
        d.text(x + 182, y + 4, name, 15)
        for rank in range(4):
            d.text(x, y + 35 + rank * 30, f"{d.word('rank')} {rank}", 12.5, MUTED, "start")
        _memory(d, x + 54, y + 22, before)
        d.arrow((x + 164, y + 80), (x + 196, y + 80))
        _memory(d, x + 206, y + 22, after)
    return d


_WHOLE = (0.0, 0.0, 1.0, 1.0)
# For each paradigm what the two devices hold: of the batch and of the stack of layers, as (left, top, right, bottom).
_SHARES = {
    "data": (((0, 0, 1, 0.5), (0, 0.5, 1, 1)), (_WHOLE, _WHOLE)),
    "tensor": ((_WHOLE, _WHOLE), ((0, 0, 0.5, 1), (0.5, 0, 1, 1))),
    "pipeline": ((_WHOLE, None), ((0, 0, 1, 0.5), (0, 0.5, 1, 1))),
    "sequence": (((0, 0, 0.5, 1), (0.5, 0, 1, 1)), (_WHOLE, _WHOLE)),
    "zero": (((0, 0, 1, 0.5), (0, 0.5, 1, 1)), ((0, 0, 0.5, 1), (0.5, 0, 1, 1))),
}


def _grid(d: Drawing, x: float, y: float, shape: tuple[int, int], cell: tuple[float, float], share: object, fill: str,
          gap: float = 0) -> None:  # fmt: skip
    """Draw cells, those inside of the share filled, the others as empty dashed outlines."""
    rows, columns = shape
    for r in range(rows):
        for c in range(columns):
            left, top, right, bottom = share if isinstance(share, tuple) else (0, 0, 0, 0)
            inside = left <= (c + 0.5) / columns < right and top <= (r + 0.5) / rows < bottom
            more: dict[str, Any] = {} if inside else {"stroke_dasharray": "2 2", "stroke": "#c3cad1"}
            d.box(x + c * cell[0], y + r * (cell[1] + gap), *cell, fill if inside else "white", **more)


def draw_paradigms(language: str) -> Drawing:
    """What each of two devices holds under five paradigms."""
    d = Drawing(336, language, LABELS)
    d.text(4, 112, d.word("batch"), 13, MUTED, "start")
    d.text(4, 228, d.word("layers"), 13, MUTED, "start")
    for index, (name, (batch, layers)) in enumerate(_SHARES.items()):
        x = 48 + index * 129
        d.box(x, 8, 124, 302, rx=8)
        d.text(x + 62, 28, d.word(name), 14)
        d.text(x + 62, 54, d.word("device"), 12.5, MUTED)
        for device in range(2):
            left = x + 5 + device * 59
            d.text(left + 28, 72, str(device), 12.5, MUTED)
            _grid(d, left + 1, 84, (4, 6), (9, 16), batch[device], RANKS[device])
            d.arrow((left + 28, 154), (left + 28, 174))
            _grid(d, left + 1, 182, (4, 2), (27, 22), layers[device], RANKS[device], gap=8)
    d.text(345, 324, d.word("batch rows"), 12.5, MUTED)
    return d


def _matrix(d: Drawing, x: float, y: float, width: float, height: float, parts: tuple[str, ...], across: bool) -> None:
    """Draw the shards of a matrix, side by side (across) or one above the other; one shard means both devices."""
    for i, name in enumerate(parts):
        w, h = (width / len(parts), height) if across else (width, height / len(parts))
        at = (x + i * w, y) if across else (x, y + i * h)
        d.box(*at, w, h, GREY if len(parts) == 1 else RANKS[i], name, 14)


def draw_tensor_split(language: str) -> Drawing:
    """C = AB with B split by columns and by rows."""
    d = Drawing(330, language, LABELS)
    for i, words in enumerate((f"{d.word('device')} 0", f"{d.word('device')} 1", d.word("both"))):
        d.box(350 + i * 98, 14, 16, 16, (*RANKS[:2], GREY)[i])
        d.text(372 + i * 98, 22, words, 12.5, MUTED, "start")
    rows = ((50, "columns", ("A",), True, "gather"), (214, "rows", ("A₀", "A₁"), False, "reduce"))
    for y, title, first, is_across, name in rows:
        middle = y + 45
        d.text(14, y - 26, d.word(title), 15, INK, "start")
        _matrix(d, 14, y, 96, 90, first, across=True)
        d.text(128, middle, "×", 20)
        _matrix(d, 146, y, 120, 90, ("B₀", "B₁"), across=is_across)
        d.text(284, middle, "=", 20)
        if is_across:
            _matrix(d, 302, y, 120, 90, ("AB₀", "AB₁"), across=True)
        else:
            for i, product in enumerate(("A₀B₀", "A₁B₁")):
                d.box(302 + i * 94, y + 12, 74, 66, RANKS[i], product, 14)
            d.text(386, middle, "+", 18)
        d.arrow((482, middle), (540, middle))
        d.text(511, middle - 17, name, 13, MUTED)
        _matrix(d, 556, y, 120, 90, ("C",), across=True)
    return d


def draw_workflow(language: str) -> Drawing:
    """From launch to save, in six steps; training repeats."""
    d = Drawing(226, language, LABELS)
    for i, (name, *words) in enumerate(STEPS):
        row, column = divmod(i, 3)
        x, y = 10 + column * 232, 12 + row * 104
        d.box(x, y, 206, 72, GREY if name in {"plugin", "boost"} else EMPTY, rx=8)
        d.text(x + 103, y + 24, name, 17)
        d.text(x + 103, y + 50, words[d.language], 13)
        if column:
            d.arrow((x - 24, y + 36), (x - 2, y + 36))
    d.arrow((577, 86), (577, 100), (113, 100), (113, 114))
    d.arrow((405, 190), (405, 210), (285, 210), (285, 192))
    return d


def draw_layers(language: str) -> Drawing:
    """The layers of the library; each uses those below it."""
    d = Drawing(50 + 56 * len(FLOORS), language, LABELS)
    d.text(271, 24, d.word("here"), 13, MUTED)
    d.text(609, 24, d.word("planned"), 13, MUTED)
    for i, (name, english, chinese, planned) in enumerate(FLOORS):
        y = 42 + i * 56
        d.box(10, y, 522, 46, EMPTY, rx=6)
        d.text(22, y + 23, name, 13, INK, "start")
        d.text(520, y + 23, (english, chinese)[d.language], 12.5, MUTED, "end")
        if planned:
            d.box(542, y, 138, 46, "white", planned, 12.5, rx=6, stroke_dasharray="5 4")
    return d


FIGURES = {
    "concepts_world": draw_world,
    "concepts_collectives": draw_collectives,
    "concepts_paradigms": draw_paradigms,
    "concepts_tensor_split": draw_tensor_split,
    "concepts_workflow": draw_workflow,
    "concepts_layers": draw_layers,
}

if __name__ == "__main__":
    write_figures(FIGURES)
