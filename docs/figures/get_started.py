"""Draws the schematic figures of get_started, launch and cluster utilities, in both languages.

Run it from anywhere: `python docs/figures/get_started.py`. The same input gives the same bytes.
"""

from itertools import pairwise

from drawing import EMPTY, GREY, MUTED, RANKS, Drawing, tint, write_figures

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
    "run_demo": ("Quick demo", "快速演示"),
    "finetune": ("Fine-tune", "微调"),
    "will_it_fit": ("Will it fit?", "放得下吗？"),
    "fit": ("Fit a larger model", "训练更大的模型"),
    "performance": ("Performance guide", "性能指南"),
    "nodes": ("Several nodes", "多机训练"),
    "troubleshooting": ("Troubleshooting", "故障排查"),
    "booster": ("Booster", "Booster"),
    "gemini": ("Gemini", "Gemini"),
    "shardformer": ("Shardformer", "Shardformer"),
    "pipeline": ("Pipeline parallelism", "流水线并行"),
    "checkpoints": ("Checkpoints", "检查点"),
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


def _label(d: Drawing, key: str, *values: object) -> str:
    return d.word(key).format(*values)


def draw_meeting(language: str) -> Drawing:
    """Four processes on two machines meet at rank 0's port, then connect to each other."""
    d = Drawing(330, language, LABELS)
    d.box(215, 18, 260, 54, tint("communication"), d.word("store"), 15, rx=6)
    d.text(16, 36, d.word("meet"), 14, MUTED, "start")
    d.text(16, 56, d.word("leave"), 14, MUTED, "start")
    centers = (100, 250, 440, 590)
    for machine, left in enumerate((16, 356)):
        d.box(left, 140, 318, 126, EMPTY, rx=6, stroke_dasharray="5 4")
        d.text(left + 159, 252, _label(d, "machine", machine), 14, MUTED)
    for rank, center in enumerate(centers):
        d.box(center - 60, 156, 120, 76, RANKS[rank], rx=6)
        d.text(center, 183, _label(d, "rank", rank), 15)
        d.text(center, 207, _label(d, "local", rank % 2), 13)
        d.arrow((center, 154), (345 + (center - 345) * 0.4, 76))
    for left, right in pairwise(centers):
        d.arrow((left + 62, 194), (right - 62, 194), both=True)
    d.text(345, 300, d.word("connect"), 14, MUTED)
    return d


def draw_turns(language: str) -> Drawing:
    """What priority_execution lets each rank do, over time."""
    d = Drawing(290, language, LABELS)
    d.box(280, 30, 96, 200, tint("communication"), rx=6)
    for rank in range(4):
        y = 44 + 46 * rank
        d.text(50, y + 17, _label(d, "rank", rank), 15)
        if rank == 0:
            d.box(100, y, 170, 34, RANKS[rank], d.word("creates"), 14, rx=6)
        else:
            d.text(185, y + 17, d.word("waits"), 14, MUTED)
            d.box(390, y, 170, 34, RANKS[rank], d.word("reads"), 14, rx=6)
    d.text(328, 17, d.word("agree"), 13, MUTED)
    d.arrow((100, 256), (590, 256))
    d.text(602, 256, d.word("time"), 14, MUTED, "start")
    return d


def draw_roadmap(language: str) -> Drawing:
    """The goals of a reader, and the pages to begin with."""
    d = Drawing(406, language, LABELS)
    rows = (
        ("start", ("run_demo", "finetune", "booster")),
        ("larger", ("will_it_fit", "fit", "gemini")),
        ("faster", ("performance", "shardformer", "pipeline")),
        ("operate", ("nodes", "checkpoints", "troubleshooting")),
        ("understand", ("distributed_training", "paradigms", "overview")),
        ("contribute", ("architecture", "documentation")),
    )
    for row, (goal, pages) in enumerate(rows):
        top = 12 + 65 * row
        d.box(10, top, 142, 52, GREY, d.word(goal), 14, rx=6, stroke="none")
        for column, page in enumerate(pages):
            left = 174 + 174 * column
            d.box(left, top, 158, 52, "white", d.word(page), rx=6)
            d.arrow((left - (22 if column == 0 else 16), top + 26), (left - 2, top + 26))
    return d


FIGURES = {
    "launch_meeting": draw_meeting,
    "launch_turns": draw_turns,
    "get_started_roadmap": draw_roadmap,
}

if __name__ == "__main__":
    write_figures(FIGURES)
