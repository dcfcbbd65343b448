"""No page says how fast a GPU is, or how much of its memory is saved, before a run on one has left a record.

A claim is a sentence, or a row of a table, that names a GPU and a measured amount: a number with a unit of time, speed
or memory, or a ratio. Numbers that are no measurement (ranks, versions, bits, capabilities) have no such unit. What
others have measured may be told with the address of its source.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RECORD = "docs/measured/gpu.md"
"""Where ``tests/gpu/run.py`` leaves what it found."""

FACTS = {
    ("en/concepts/distributed_training.md", "two GPUs with 3 GB of memory each"): "history, from AlexNet's paper",
    ("en/concepts/distributed_training.md", "an H100 has 80 GB"): "data sheets, and their ratio",
    ("zh-Hans/concepts/distributed_training.md", "两块 3 GB 显存的 GPU"): "history, from AlexNet's paper",
    ("zh-Hans/concepts/distributed_training.md", "H100 有 80 GB"): "data sheets, and their ratio",
}
"""Sentences that name both and claim nothing, by page and a part, and what they are."""

_GPU = re.compile(
    r"\b(?:GPUs?|CUDA|NCCL|NVIDIA|ROCm|[ABHV][12]00|A10|L4|L40S?|RTX|GB200|MI[23]\d\dX?)(?![\w`=])|显卡|显存",
)
_WORDS_OF_RATIO = r"times|fold|倍"
_UNIT = (
    r"ns|µs|us|ms|s|sec|seconds?|minutes?|hours?|[KMGT]i?B(?:/s)?|gigabytes?|megabytes?|"
    r"(?:T|G)FLOPS?|(?:tokens|samples|steps|images)(?:/s| per second| a second)|"
    r"%|percent|个百分点|秒|毫秒|微秒|分钟|小时|" + _WORDS_OF_RATIO
)
_NUMBER = r"(?<![\w.\-/])\d[\d,]*(?:\.\d+)?"
_AMOUNT = re.compile(rf"{_NUMBER}\s?(?:{_UNIT})(?![A-Za-z])|{_NUMBER}\s?[x×](?=\s|$|[,.;)|])")
_SENTENCE = re.compile(r"(?<=[.!?。！？;；])\s+|(?<=[。！？；])")
_FENCE = re.compile(r"^(\s*>?\s*)(```+|~~~+).*?^\1?\s*\2\s*$", re.MULTILINE | re.DOTALL)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page in Markdown, and the rows of its tables; no code."""
    prose = _FENCE.sub("\n\n", text)
    for paragraph in re.split(r"\n\s*\n", prose):
        lines = [line.strip().removeprefix(">").strip() for line in paragraph.splitlines()]
        yield from (line for line in lines if line.startswith("|"))
        yield from _SENTENCE.split(" ".join(line for line in lines if not line.startswith("|")))


def claims(text: str) -> list[str]:
    """What a page says of GPUs that only a run on one could tell."""
    return [
        sentence
        for sentence in sentences(text)
        if _GPU.search(sentence) and _AMOUNT.search(sentence) and "https://" not in sentence
    ]


def pages(repository: Path) -> list[Path]:
    found = [*(repository / "docs/source").rglob("*.md"), *(repository / "changes").glob("*.md")]
    return [repository / "README.md", repository / "CHANGELOG.md", *found]


def test_no_page_claims_what_no_gpu_has_shown(repository) -> None:
    looked_at = {str(page.relative_to(repository)): claims(page.read_text("utf-8")) for page in pages(repository)}
    assert any("booster_api" in page for page in looked_at)
    found = [(page, claim) for page, each in looked_at.items() for claim in each]
    known = {fact: [claim for page, claim in found if page.endswith(fact[0]) and fact[1] in claim] for fact in FACTS}
    assert all(known.values()), "a fact that is told no longer needs no exception"
    told = [claim for each in known.values() for claim in each]
    open_ones = [f"{page}: {claim}" for page, claim in found if claim not in told]
    assert not open_ones or (repository / RECORD).is_file(), f"There is no {RECORD}:\n" + "\n".join(open_ones)


@pytest.mark.parametrize(
    "planted",
    [
        "On an H100 a step takes 12.5 ms.",
        "On GPUs it is 1.8 times as fast as DeepSpeed.",
        "ZeRO-2 saves 30 % of the memory of a GPU.",
        "Gemini trains a model of 10 billion parameters in 40 GB of CUDA memory.",
        "It reaches 45,000 tokens per second with NCCL on\ntwo nodes.",
        "| TorchDDPPlugin | A100 | 2x |",
        "> On a GPU this is 3x faster.",
        "在 A100 上，每步只需 12 毫秒。",
        "显存占用减少到原来的 0.5 倍。",
    ],
)
def test_a_claim_is_found(planted) -> None:
    text = f"# Speed\n\nAll of it runs on a CPU. {planted}\n\nIt is tested.\n"
    assert len(claims(text if not planted.startswith(("|", ">")) else f"# Speed\n\n{planted}\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "A GPU has some tens of gigabytes of memory.",
        "With 4 GPUs there are 4 processes, and NCCL 2.27 carries their data.",
        "fp8 needs GPUs of compute capability 8.9 and above, bf16 takes 16 bits.",
        "On two cores a step takes 3 ms. None of this has run on a GPU.",
        "`launch` waits 600 s for a peer.",
        "FlashAttention is 2.4 times as fast on an A100 (https://arxiv.org/abs/2205.14135).",
        "Build it:\n\n```shell\nCUDA_EXT=1 pip install .  # 30 s on a GPU\n```\n\nThen run it.",
        "Set `--gpus=2` and wait 10 s.",
    ],
)
def test_what_needs_no_gpu_to_be_known_is_none(text) -> None:
    assert claims(text) == []
