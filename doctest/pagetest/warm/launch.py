"""How a command launches its page: on how many ranks, with which arguments."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

_RANKS = ("--nproc_per_node", "--nproc-per-node")
_SINGLE_NODE = ("--standalone", "--nnodes=1")


@dataclass(frozen=True)
class Launch:
    """What a command of a page asks for."""

    ranks: int  # processes that the launcher starts; 0 where there is no launcher
    arguments: tuple[str, ...]
    is_plain: bool  # whether the ranks and the arguments are all that it asks for


def read_launch(words: Sequence[str]) -> Launch:
    """Reads a command that the rules of pages allow."""
    start = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    head, arguments = list(words[:start]), tuple(words[start:])
    if head[:1] == ["python"] and head[1:3] != ["-m", "torch.distributed.run"]:
        return Launch(0, arguments, head[1:] in ([], ["-u"]))
    first = next((index for index, word in enumerate(head) if word.startswith("--")), len(head))
    ranks, others = _ranks(head[first:])
    count = int(ranks) if ranks.isdecimal() else os.cpu_count() or 1
    is_torchrun = head[:1] in (["torchrun"], ["python"])
    is_plain = is_torchrun and ranks.isdecimal() and count > 0 and all(option in _SINGLE_NODE for option in others)
    return Launch(count, arguments, is_plain)


def _ranks(options: Sequence[str]) -> tuple[str, list[str]]:
    """The number of ranks as it is written, one by default, and the other options."""
    ranks, others, rest = "1", [], list(options)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in _RANKS:
            ranks = value if equals else rest.pop(0) if rest else ""
        else:
            others.append(f"{name}{equals}{value}")
    return ranks, others
