"""Draws the schematic figures of get_started, launch and cluster utilities, in both languages.

Run it from anywhere: `python docs/figures/get_started.py`. The same input gives the same bytes.
"""

from html import escape
from itertools import pairwise
from pathlib import Path

from colossal.testing import COLORS

SOURCE = Path(__file__).resolve().parents[1] / "source"
LANGUAGES = ("en", "zh-Hans")

INK, GREY, BLUE, GREEN, ORANGE = "#1f2933", "#6b7785", "#dbe9f9", "#dff2e1", "#fdeacc"
BLUE_LINE, GREEN_LINE, ORANGE_LINE = "#2f6db3", "#3c8d4a", "#c17d11"
FONT = "'DejaVu Sans', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"

# One row per label: English, Chinese.
LABELS = {
    "machine": ("machine {}", "机器 {}"),
    "rank": ("rank {}", "rank {}"),
    "local": ("local rank {}", "local rank {}"),
    "store": ("host:port of rank 0", "rank 0 的主机:端口"),
    "meet": ("1. all come here", "1. 所有进程到此会合"),
    "leave": ("and exchange addresses", "并交换各自的地址"),
    "connect": ("2. then they are connected to each other: a world of 4", "2. 之后两两相连，组成 4 个进程的 world"),
    "start": ("start", "入门"),
    "larger": ("fit a larger model", "训练更大的模型"),
    "faster": ("go faster", "在多块 GPU 上更快"),
    "operate": ("operate", "运行"),
    "understand": ("understand", "理解原理"),
    "contribute": ("contribute", "参与开发"),
    "installation": ("Installation", "安装"),
    "run_demo": ("Quick demo", "快速演示"),
    "booster": ("Booster", "Booster"),
    "precision": ("Mixed precision", "混合精度"),
    "zero": ("ZeRO", "ZeRO"),
    "gemini": ("Gemini", "Gemini"),
    "shardformer": ("Shardformer", "Shardformer"),
    "tensor": ("Tensor parallelism", "张量并行"),
    "pipeline": ("Pipeline parallelism", "流水线并行"),
    "launch": ("Launch", "启动"),
    "checkpoints": ("Checkpoints", "检查点"),
    "faults": ("Fault tolerance", "容错"),
    "distributed_training": ("Distributed training", "分布式训练"),
    "paradigms": ("Kinds of parallelism", "并行技术"),
    "overview": ("Overview of colossal", "colossal 总览"),
    "architecture": ("Architecture", "架构"),
    "documentation": ("Write a page", "编写页面"),
    "time": ("time", "时间"),
    "waits": ("waits", "等待"),
    "creates": ("creates the file", "创建文件"),
    "reads": ("reads the file", "读取文件"),
    "agree": ("all-reduce: did it fail?", "all-reduce：执行失败了吗？"),
}


class Drawing:
    """An SVG picture on a white ground, in one language.

    Args:
        width: In pixels.
        height: In pixels.
        language: Column of `LABELS`.
    """

    def __init__(self, width: int, height: int, language: str) -> None:
        self.language = LANGUAGES.index(language)
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
            f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="14" fill="{INK}">',
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"',
            f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{GREY}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        ]

    def label(self, key: str, *values: object) -> str:
        """Return a label in the language of the picture."""
        return LABELS[key][self.language].format(*values)

    def text(self, x: float, y: float, text: str, size: int = 14, color: str = INK, anchor: str = "middle") -> None:
        """Write a line of text."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, fill: str, line: str, dash: str = "") -> None:
        """Draw a rounded box."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" '
            f'stroke="{line}" stroke-width="1.5"{dashes}/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, *, both: bool = False) -> None:
        """Draw an arrow from the first point to the second."""
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{GREY}" stroke-width="1.5" '
            f'marker-end="url(#tip)"{start}/>'
        )

    def save(self, name: str) -> None:
        """Write the picture into the folder of its language."""
        folder = SOURCE / LANGUAGES[self.language] / "images"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>", ""]), encoding="utf-8")


def draw_meeting(language: str) -> None:
    """Four processes on two machines meet at rank 0's port, then connect to each other."""
    d = Drawing(720, 330, language)
    d.box(230, 18, 260, 54, ORANGE, ORANGE_LINE)
    d.text(360, 50, d.label("store"), 15)
    d.text(30, 40, d.label("meet"), 14, GREY, "start")
    d.text(30, 60, d.label("leave"), 14, GREY, "start")
    centres = (115, 265, 455, 605)
    for machine, left in enumerate((30, 370)):
        d.box(left, 140, 320, 126, "#f5f7f9", GREY, "5 4")
        d.text(left + 160, 258, d.label("machine", machine), 14, GREY)
    for rank, centre in enumerate(centres):
        d.box(centre - 62, 156, 124, 76, BLUE, BLUE_LINE)
        d.text(centre, 188, d.label("rank", rank), 15)
        d.text(centre, 212, d.label("local", rank % 2), 13, GREY)
        d.arrow(centre, 154, 360 + (centre - 360) * 0.4, 76)
    for left, right in pairwise(centres):
        d.arrow(left + 64, 194, right - 64, 194, both=True)
    d.text(360, 304, d.label("connect"), 14, GREY)
    d.save("launch_meeting")


def draw_turns(language: str) -> None:
    """What priority_execution lets each rank do, over time."""
    d = Drawing(720, 290, language)
    d.box(300, 30, 96, 200, ORANGE, ORANGE_LINE)
    for rank in range(4):
        y = 44 + 46 * rank
        d.text(70, y + 22, d.label("rank", rank), 15)
        if rank == 0:
            d.box(120, y, 170, 34, GREEN, GREEN_LINE)
            d.text(205, y + 22, d.label("creates"))
        else:
            d.text(205, y + 22, d.label("waits"), 14, GREY)
            d.box(410, y, 170, 34, BLUE, BLUE_LINE)
            d.text(495, y + 22, d.label("reads"))
    d.text(348, 20, d.label("agree"), 13, GREY)
    d.arrow(120, 256, 600, 256)
    d.text(612, 261, d.label("time"), 14, GREY, "start")
    d.save("launch_turns")


def draw_roadmap(language: str) -> None:
    """The goals of a reader, and the pages to begin with."""
    d = Drawing(760, 406, language)
    rows = (
        ("start", "forward", ("installation", "run_demo", "booster")),
        ("larger", "memory", ("precision", "zero", "gemini")),
        ("faster", "communication", ("shardformer", "tensor", "pipeline")),
        ("operate", "weight gradients", ("launch", "checkpoints", "faults")),
        ("understand", "update", ("distributed_training", "paradigms", "overview")),
        ("contribute", "backward", ("architecture", "documentation")),
    )
    for row, (goal, meaning, pages) in enumerate(rows):
        top = 12 + 65 * row
        d.box(12, top, 160, 52, COLORS[meaning], COLORS[meaning])
        d.text(92, top + 31, d.label(goal), 15, "#ffffff")
        for column, page in enumerate(pages):
            left = 196 + 190 * column
            d.box(left, top, 166, 52, "#ffffff", COLORS[meaning])
            d.text(left + 83, top + 31, d.label(page))
            d.arrow(left - 23, top + 26, left - 2, top + 26)
    d.save("get_started_roadmap")


def main() -> None:
    """Draw every figure in every language."""
    for language in LANGUAGES:
        draw_meeting(language)
        draw_turns(language)
        draw_roadmap(language)


if __name__ == "__main__":
    main()
