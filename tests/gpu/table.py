"""The table that a run on GPUs leaves, in Markdown."""

import datetime as dt
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Row = Mapping[str, Any]


def write_table(file: Path, machine: Row, results: Sequence[Row]) -> None:
    """Write what is known.

    Args:
        file: Where.
        machine: Device, number of devices, and versions.
        results: Rows with ``part``, ``name``, ``status``, ``values``, ``remark``, ``seconds``.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines(machine, results)) + "\n", encoding="utf-8")


def lines(machine: Row, results: Sequence[Row]) -> Iterator[str]:
    """The lines of the page."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    versions = ", ".join(f"{key} {machine[key]}" for key in ("python", "torch", "cuda", "nccl") if machine[key])
    yield "# On GPUs"
    yield ""
    day = dt.datetime.now(dt.UTC).date().isoformat()
    yield f"{machine['count']} x {machine['device']}; {versions}; commit {commit}, {day}."
    if ranks := machine.get("shared_by"):
        yield f"Up to {ranks} ranks shared it. Collectives passed through host memory: no row is about NCCL or speed."
    by_part: dict[str, list[Row]] = {}
    for row in results:
        by_part.setdefault(row["part"], []).append(row)
    device = next((row["values"] for row in by_part.get("rates", []) if row["values"]), {})
    for part, rows in by_part.items():
        yield from ("", f"## {part.capitalize()}", "")
        yield from races(rows, device) if part == "speed" else plain(rows, device)


def races(rows: Sequence[Row], device: Row) -> Iterator[str]:
    """Contenders of races, beside each other."""
    yield "| race | contender | tokens per second | of a matrix product's rate | peak memory, GB |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        if row["status"] != "ok":
            yield f"| {row['name']} | | {row['status']}: {cell(row['remark'])} | | |"
        for contender, found in row["values"].items():
            if "left out" in found:
                yield f"| {row['name']} | {contender} | {found['left out']} | | |"
                continue
            share = found["flops_per_second"] / device["flops_per_second"] if device else float("nan")
            yield (
                f"| {row['name']} | {contender} | {found['tokens_per_second']:,.0f} | {share:.3f} "
                f"| {found['peak_bytes'] / 1e9:.2f} |"
            )


def plain(rows: Sequence[Row], device: Row) -> Iterator[str]:
    """One row for each case, with its values."""
    yield "| case | result | values |"
    yield "| --- | --- | --- |"
    for row in rows:
        values = dict(row["values"])
        if "bytes_per_second" in values and device:
            values["of the rate of a copy"] = values["bytes_per_second"] / device["copy_bytes_per_second"]
        said = "; ".join(f"{key.replace('_', ' ')} {number(value)}" for key, value in values.items())
        yield f"| {row['name']} | {row['status']} | {cell(row['remark']) or said} |"


def number(value: Any) -> str:
    """Four digits, and powers of ten where there are many."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cell(text: str) -> str:
    """Keep a text in its cell."""
    return " ".join(text.split()).replace("|", "\\|")[:300]
