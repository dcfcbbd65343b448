"""Draws the schematic figures of the concept pages, in both languages: python docs/figures/concepts.py."""

from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

SOURCE = Path(__file__).resolve().parents[1] / "source"
LANGUAGES = ("en", "zh-Hans")

INK, MUTED, LINE, EMPTY = "#1f2933", "#5b6770", "#8a97a3", "#f3f5f7"
RANKS = ("#9ecae1", "#fdae6b", "#a1d99b", "#cbb3e0")
SUM, ACCENT = "#e0e4e8", "#c2410c"
FONT = "'DejaVu Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', Helvetica, Arial, sans-serif"

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
    "columns": ("by columns: gather the parts", "按列切分：收集各部分"),
    "rows": ("by rows: add the summands", "按行切分：累加各项"),
    "both": ("on both devices", "两台设备都有"),
    "planned": ("planned", "计划中"),
    "here": ("here now", "已可用"),
}
STEPS = (
    ("launch", "join the world", "加入进程世界"),
    ("build", "model, optimizer, data", "模型、优化器、数据"),
    ("plugin", "choose the recipe", "选定并行方案"),
    ("boost", "make them parallel", "改造为并行组件"),
    ("train", "forward, backward, step", "前向、反向、更新"),
    ("save", "once for all ranks", "所有 rank 只存一份"),
)
FLOORS = (
    ("booster, cli", "one set of verbs, plugins", "统一接口与插件", "legacy, inference"),
    ("shardformer, pipeline, zero, checkpoint_io", "methods, blind to each other", "各种方法，互不依赖", ""),
    ("nn, amp, interface", "layers, optimizers, loss scaling", "层、优化器、损失缩放", ""),
    ("kernel, tensor, lazy", "layouts, plans, fast arithmetic", "布局、切分方案、高性能算子", ""),
    ("comm", "collectives with gradients, counted", "带梯度、可计量的集合通信", ""),
    ("cluster, accelerator", "launch, mesh, devices", "启动、设备网格、设备", ""),
    ("errors, logging", "the ground", "基础", ""),
)


class Drawing:
    """An SVG under construction; `text` looks words up in the language of the figure."""

    def __init__(self, width: float, height: float, language: str) -> None:
        self.size, self.language, self.parts = (width, height), LANGUAGES.index(language), []

    def word(self, name: str) -> str:
        """Return a label in this figure's language."""
        return LABELS[name][self.language]

    def box(self, x: float, y: float, width: float, height: float, fill: str = "white", **more: object) -> None:
        """Draw a rectangle; further keywords become attributes."""
        style = {"stroke": LINE, "stroke-width": 1} | {name.replace("_", "-"): value for name, value in more.items()}
        attributes = "".join(f' {name}="{value}"' for name, value in style.items())
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{attributes}/>'
        )

    def text(self, x: float, y: float, words: str, size: float = 13, fill: str = INK, anchor: str = "middle") -> None:
        """Write words whose vertical middle is about `y`."""
        self.parts.append(
            f'<text x="{x:g}" y="{y + size * 0.35:g}" font-size="{size:g}" fill="{fill}" '
            f'text-anchor="{anchor}">{escape(words)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a straight arrow."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{MUTED}" stroke-width="1.5" '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """Return the file's content, on white, so that it can be read on any background."""
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="{FONT}">\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>\n'
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def draw_world(language: str) -> Drawing:
    """Two nodes with four processes each, and the group of the even ones."""
    d = Drawing(860, 300, language)
    d.box(10, 12, 840, 276, "white", stroke=LINE, stroke_dasharray="5 4", rx=10)
    d.text(26, 32, d.word("default group"), 13, MUTED, "start")
    for node in range(2):
        left = 30 + node * 410
        d.box(left, 52, 390, 150, EMPTY, rx=8)
        d.text(left + 14, 72, f"{d.word('node')} {node}", 14, INK, "start")
        if node == 0:
            d.box(left + 250, 60, 130, 24, "white", stroke=ACCENT, rx=4)
            d.text(left + 315, 72, d.word("host"), 12, ACCENT)
        for gpu in range(4):
            rank, x = 4 * node + gpu, left + 16 + gpu * 92
            d.box(x, 98, 82, 88, RANKS[1] if rank % 2 == 0 else "white", rx=6)
            d.text(x + 41, 124, f"{d.word('rank')} {rank}", 15)
            d.text(x + 41, 158, f"{d.word('gpu')} {gpu}", 13, MUTED)
            if rank % 2 == 0:
                d.arrow(x + 41, 188, x + 41, 222)
                d.box(x + 19, 224, 44, 28, RANKS[1], rx=4)
                d.text(x + 41, 238, str(rank // 2), 15)
    d.text(430, 270, d.word("even group"), 13, MUTED)
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
            fill = EMPTY if not name else SUM if name[0] == "S" else RANKS["ABCD".index(name[0])]
            d.box(x + c * cell, y + r * (cell + 4), cell, cell, fill)
            d.text(x + (c + 0.5) * cell, y + r * (cell + 4) + cell / 2, name.replace("S", "Σ"), 11)


def draw_collectives(language: str) -> Drawing:
    """Eight collectives among four ranks, before and after."""
    d = Drawing(880, 700, language)
    for index, (name, before, after) in enumerate(_collectives()):
        column, row = index % 2, index // 2
        x, y = 24 + column * 432, 20 + row * 170
        d.text(x + 200, y + 4, name, 15)
        for rank in range(4):
            d.text(x, y + 35 + rank * 30, f"{d.word('rank')} {rank}", 12, MUTED, "start")
        _memory(d, x + 60, y + 22, before)
        d.arrow(x + 178, y + 80, x + 222, y + 80)
        _memory(d, x + 236, y + 22, after)
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
            more = {} if inside else {"stroke_dasharray": "2 2", "stroke": "#c3cad1"}
            d.box(x + c * cell[0], y + r * (cell[1] + gap), *cell, fill if inside else "white", **more)


def draw_paradigms(language: str) -> Drawing:
    """What each of two devices holds under five paradigms."""
    d = Drawing(1010, 330, language)
    d.text(12, 112, d.word("batch"), 13, MUTED, "start")
    d.text(12, 236, d.word("layers"), 13, MUTED, "start")
    for index, (name, (batch, layers)) in enumerate(_SHARES.items()):
        x = 66 + index * 188
        d.box(x, 12, 178, 296, "white", rx=8)
        d.text(x + 89, 34, d.word(name), 15)
        for device in range(2):
            left = x + 12 + device * 80
            d.text(left + 37, 58, f"{d.word('device')} {device}", 12, MUTED)
            _grid(d, left + 1, 78, (4, 6), (12, 16), batch[device], RANKS[device])
            d.arrow(left + 37, 148, left + 37, 168)
            _grid(d, left + 1, 176, (4, 2), (36, 22), layers[device], RANKS[device], gap=8)
    d.text(505, 320, d.word("batch rows"), 12, MUTED)
    return d


def _matrix(d: Drawing, x: float, y: float, width: float, height: float, parts: tuple[str, ...], across: bool) -> None:
    """Draw a matrix cut into parts, side by side (across) or one above the other; one part means both devices."""
    for i, name in enumerate(parts):
        w, h = (width / len(parts), height) if across else (width, height / len(parts))
        fill = SUM if len(parts) == 1 else RANKS[i]
        at = (x + i * w, y) if across else (x, y + i * h)
        d.box(*at, w, h, fill)
        d.text(at[0] + w / 2, at[1] + h / 2, name, 14)


def draw_tensor_split(language: str) -> Drawing:
    """C = AB with B cut by columns and by rows."""
    d = Drawing(820, 330, language)
    d.text(30, 24, d.word("columns"), 15, INK, "start")
    _matrix(d, 30, 50, 100, 90, ("A",), across=True)
    d.text(155, 95, "×", 20)
    _matrix(d, 180, 50, 130, 90, ("B₀", "B₁"), across=True)
    d.text(335, 95, "=", 20)
    _matrix(d, 360, 50, 130, 90, ("AB₀", "AB₁"), across=True)
    d.arrow(510, 95, 570, 95)
    d.text(540, 78, "gather", 12, MUTED)
    _matrix(d, 586, 50, 130, 90, ("C",), across=True)
    d.text(30, 188, d.word("rows"), 15, INK, "start")
    _matrix(d, 30, 214, 100, 90, ("A₀", "A₁"), across=True)
    d.text(155, 259, "×", 20)
    _matrix(d, 180, 209, 130, 100, ("B₀", "B₁"), across=False)
    d.text(335, 259, "=", 20)
    for i in range(2):
        d.box(360 + i * 104, 226, 80, 66, RANKS[i])
        d.text(400 + i * 104, 259, ("A₀B₀", "A₁B₁")[i], 14)
    d.text(452, 259, "+", 18)
    d.arrow(556, 259, 616, 259)
    d.text(586, 242, "reduce", 12, MUTED)
    _matrix(d, 632, 214, 130, 90, ("C",), across=True)
    for i, words in enumerate((f"{d.word('device')} 0", f"{d.word('device')} 1", d.word("both"))):
        d.box(420 + i * 120, 14, 16, 16, (*RANKS[:2], SUM)[i])
        d.text(442 + i * 120, 22, words, 12, MUTED, "start")
    return d


def draw_workflow(language: str) -> Drawing:
    """From launch to save, in six steps."""
    d = Drawing(1010, 150, language)
    for i, (name, *words) in enumerate(STEPS):
        x = 14 + i * 166
        d.box(x, 30, 146, 82, RANKS[1] if name in {"plugin", "boost"} else RANKS[0], rx=8)
        d.text(x + 73, 56, name, 17)
        d.text(x + 73, 88, words[d.language], 10.5)
        if i < len(STEPS) - 1:
            d.arrow(x + 148, 71, x + 164, 71)
    d.parts.append(
        f'<path d="M 764 114 V 134 H 732 V 116" fill="none" stroke="{MUTED}" stroke-width="1.5" '
        'marker-end="url(#head)"/>'
    )
    return d


def draw_layers(language: str) -> Drawing:
    """The floors of the library; a floor uses those below it."""
    d = Drawing(900, 50 + 56 * len(FLOORS), language)
    d.text(390, 24, d.word("here"), 13, MUTED)
    d.text(770, 24, d.word("planned"), 13, MUTED)
    for i, (name, english, chinese, planned) in enumerate(FLOORS):
        y = 42 + i * 56
        d.box(20, y, 630, 46, RANKS[0], rx=6)
        d.text(36, y + 23, name, 15, INK, "start")
        d.text(634, y + 23, (english, chinese)[d.language], 13, INK, "end")
        if planned:
            d.box(662, y, 218, 46, "white", rx=6, stroke_dasharray="5 4")
            d.text(771, y + 23, planned, 12, MUTED)
    return d


FIGURES: dict[str, Callable[[str], Drawing]] = {
    "concepts_world": draw_world,
    "concepts_collectives": draw_collectives,
    "concepts_paradigms": draw_paradigms,
    "concepts_tensor_split": draw_tensor_split,
    "concepts_workflow": draw_workflow,
    "concepts_layers": draw_layers,
}


def main() -> None:
    """Write every figure in every language."""
    for language in LANGUAGES:
        for name, draw in FIGURES.items():
            path = SOURCE / language / "images" / f"{name}.svg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(draw(language).svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
