"""Output blocks: what a page says that its code prints: Python on rank 0, or a shell."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pagetest.finding import Finding
from pagetest.model.page import RUN, Block, Page
from pagetest.outputs.matching import ANY_NUMBER, TOLERANCE, WILDCARD, first_difference, normalize_lines
from pagetest.run.device import CPU, CUDA

_EXACT = "exact"
_MAX_SHOWN_CHARACTERS = 200
_UNCHECKED_OUTPUT = (
    "`text` straight below code that runs reads as its output, but is not compared with it: write `text output`, with "
    "`...` for what differs from run to run"
)


@dataclass(frozen=True)
class Output:
    """An output block and the block that prints it."""

    block: Block
    code: Block

    @property
    def is_exact(self) -> bool:
        """Whether its numbers must be equal as text."""
        return self.block.info_words[1:] == [_EXACT]


def outputs_of(page: Page) -> tuple[Output, ...]:
    """The output blocks that can be compared: each is the first one after code that runs."""
    return tuple(output for block, output in _output_blocks(page) if isinstance(output, Output))


def output_faults(page: Page) -> Iterator[Finding]:
    """The output blocks that cannot be compared, and the text that looks like output and is not compared."""
    for block, output in _output_blocks(page):
        if isinstance(output, str):
            yield Finding(page.path, block.line - 1, output)
    for code, block in pairwise(page.blocks):
        is_between = "".join(page.lines[code.end : block.line - 2]).strip()
        if code in page.executed and block.info.strip() == "text" and not is_between:
            yield Finding(page.path, block.line - 1, _UNCHECKED_OUTPUT)


def _output_blocks(page: Page) -> Iterator[tuple[Block, Output | str]]:
    """Each output block with its comparison, or with what forbids it."""
    code: Block | None = None
    before: Block | None = None
    for block in page.blocks:
        if block.is_code:
            code, before = block, None
        elif block.is_output:
            yield block, _fault(block, code, before) or Output(block, code)  # type: ignore[arg-type]
            before = block


def _fault(block: Block, code: Block | None, before: Block | None) -> str:
    """The first thing that forbids to compare the block, and what to do about it."""
    shown = [line for _, line in normalize_lines(block.source)]
    faults = (
        (
            block.language != "text" or block.info_words not in (["output"], ["output", _EXACT]),
            f"`{block.info}` is no block: output is shown in `text output`, or in `text output {_EXACT}`",
        ),
        (block.ignored, "output in an ignored region comes from code that is not run: write `text`, or run the code"),
        (code is None, "there is no code before this output: move it after the block that prints it"),
        (
            bool(code and code.ignored),
            "the code before this output is in an ignored region: write `text`, or run that code",
        ),
        (
            bool(code and code.file),
            f"`{code.file if code else ''}` is written, not run: show the output after the shell block that runs it",
        ),
        (
            bool(before),
            f"the block at line {before.line if before else 0} shows the output of the same code: join the two",
        ),
        (
            bool(shown) and all(line == WILDCARD for line in shown),
            f"`{WILDCARD}` alone stands for any output and proves nothing: show what is printed, or drop the block",
        ),
    )
    return next((message for is_faulty, message in faults if is_faulty), "")


def printed_by_block(marks: Iterable[Mapping[str, Any]], data: bytes) -> dict[int, str]:
    """Splits what was printed by the block that printed it."""
    # A mark says from which size of the output on it belongs to the block of which line, 0 for none.
    parts: dict[int, bytes] = {}
    ends = ({"line": 0, "size": len(data)},)
    for mark, following in pairwise((*sorted(marks, key=lambda mark: mark["size"]), *ends)):
        parts[mark["line"]] = parts.get(mark["line"], b"") + data[mark["size"] : following["size"]]
    return {line: part.decode(errors="replace") for line, part in parts.items()}


def stale_outputs(page: Page, printed: Mapping[int, str], device: str = CPU) -> list[Finding]:
    """The output blocks that differ from what was printed, each at the first line that differs."""
    return [finding for output in outputs_of(page) for finding in _stale_finding(page, output, printed, device or CPU)]


def _stale_finding(page: Page, output: Output, printed: Mapping[int, str], device: str) -> Iterator[Finding]:
    text, block = printed.get(output.code.line, ""), output.block
    where = f"the block at line {output.code.line}"
    if not normalize_lines(text):
        whose = "prints nothing" if output.code.role == RUN else "prints nothing on rank 0"
        yield Finding(page.path, block.line, f"{where} {whose}: drop this block, or print")
        return
    # Pages show what the CPU prints, so the name of the device that they ran on is read as `cpu`.
    named = re.compile(rf"\b{re.escape(device)}:\d+\b|(?<='){re.escape(device)}(?=')")
    one, other = (named.sub(CPU, lines) for lines in (block.source, text))
    differs = first_difference(one, other, output.is_exact, ANY_NUMBER if device == CUDA else TOLERANCE)
    if differs:
        expected, found = (
            f"`{_truncated(line)}`" if line else "nothing" for line in (differs.expected, differs.printed)
        )
        message = f"{where} was expected to print {expected} here and printed {found}: run with --update-outputs"
        yield Finding(page.path, block.line + differs.index, message)


def _truncated(line: str) -> str:
    return line if len(line) <= _MAX_SHOWN_CHARACTERS else f"{line[:_MAX_SHOWN_CHARACTERS]} ..."
