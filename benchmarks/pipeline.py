"""What a step of a pipeline costs on two ranks of one host, against torch's schedules driven by hand and one process.

A Llama of Hugging Face learns bytes of the standard library's sources, in float32, one thread a rank. Ours goes
through the Booster; the peers are `Schedule1F1B`, `ScheduleInterleaved1F1B` and `ScheduleZBVZeroBubble` of
`torch.distributed.pipelining` over the same stages. Turns alternate, in an order that rotates. All of them see the same
batch, and must have the same loss.

    python benchmarks/pipeline.py
    python benchmarks/pipeline.py --turns 6 --layers 4
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MICROBATCHES = 8
STYLES = ("1f1b", "interleaved", "zbv")
TOLERANCE = 1e-4


def batch_of(tokens: int) -> Any:
    """Bytes of a source file, a sequence for each micro-batch."""
    import torch

    text = Path(argparse.__file__).read_bytes()[: MICROBATCHES * tokens]
    return torch.tensor(list(text)).view(MICROBATCHES, tokens)


def build(layers: int, width: int) -> Any:
    """The model, the same on all ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "vocab_size": 256,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, use_cache=False))


def loss_of(logits: Any, ids: Any) -> Any:
    """Mean over all next bytes."""
    from torch.nn import functional

    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def own_stages(style: str, rank: int, layers: int, width: int) -> tuple[Any, list[Any]]:
    """The stages of this rank."""
    from colossal._src.pipeline import Stage, copy_structure
    from colossal.pipeline import StagePlacement, partition_uniform
    from colossal.shardformer import plan_of

    placement = StagePlacement(2, 1 if style == "1f1b" else 2, is_v=style == "zbv")
    model, parts = build(layers, width), partition_uniform(layers, placement.num_stages)
    plan = plan_of(model).stages
    assert plan is not None
    return placement, [Stage.of_model(copy_structure(model), plan, parts, i) for i in placement.stages_of(rank)]


def ours(style: Any, batch: Any, layers: int, width: int) -> Callable[[], Any]:
    """A step of ours, through the Booster."""
    import torch

    from colossal.booster import Booster
    from colossal.booster.plugin import HybridParallelPlugin

    plugin = HybridParallelPlugin(
        tp_size=1, pp_size=2, precision="fp32", num_microbatches=MICROBATCHES, pp_style=style,
        num_model_chunks=1 if style == "1f1b" else 2,
    )  # fmt: skip
    booster, model = Booster(plugin=plugin, device="cpu"), build(layers, width)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
    boosted, optimizer, *_ = booster.boost(model, optimizer)

    def step() -> Any:
        optimizer.zero_grad()
        return booster.execute_pipeline(
            iter([{"input_ids": batch}]),
            boosted,
            lambda out, part: loss_of(out.logits, part["input_ids"]),
            optimizer,
            return_loss=True,
        )["loss"]

    return step


def by_hand(style: str, mesh: Any, batch: Any, layers: int, width: int) -> Callable[[], Any]:
    """A step of torch's own schedules."""
    import torch
    from torch.distributed import pipelining

    placement, stages = own_stages(style, mesh.rank("pp"), layers, width)
    ids = batch[:1]

    class Plain(torch.nn.Module):
        def __init__(self, stage: Any) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, x: Any) -> Any:
            out = self.stage(None if self.stage.is_first else x, {"input_ids": x if self.stage.is_first else ids})
            return out.logits.clone() if self.stage.is_last else out

    own = [
        pipelining.PipelineStage(Plain(stage), stage.index, placement.num_stages, torch.device("cpu"))
        for stage in stages
    ]
    kind = {
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zbv": pipelining.ScheduleZBVZeroBubble,
    }[style]
    schedule: Any = kind(own[0] if style == "1f1b" else own, MICROBATCHES, loss_of)
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step() -> Any:
        for stage in stages:
            stage.zero_grad()
        losses: list[Any] = []
        schedule.step(*((batch,) if is_first else ()), **({"target": batch, "losses": losses} if is_last else {}))
        return sum(losses) / MICROBATCHES if losses else None

    return step


def alone(mesh: Any, batch: Any, layers: int, width: int, both: bool = False) -> Callable[[], Any]:
    """A step of one process; the other one sleeps, or does the same: what sharing a memory costs."""
    model = build(layers, width)

    def step() -> Any:
        if mesh.rank("pp") and not both:
            return None
        model.zero_grad()
        total = 0.0
        for part in batch.chunk(MICROBATCHES):
            loss = loss_of(model(input_ids=part).logits, part) / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        return total

    return step


def compete(turns: int, layers: int, width: int, tokens: int) -> dict[str, list[float]]:
    """Take turns; what a turn took is counted until both ranks are done."""
    from torch import distributed as dist

    from colossal.cluster import ParallelMesh

    with ParallelMesh(pp=2) as mesh:
        batch = batch_of(tokens)
        contenders = {
            "one process": alone(mesh, batch, layers, width),
            "two of one process": alone(mesh, batch, layers, width, both=True),
        }
        for style in STYLES:
            contenders[f"ours {style}"] = ours(style, batch, layers, width)
            contenders[f"torch {style}"] = by_hand(style, mesh, batch, layers, width)
        names = list(contenders)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        losses: dict[str, Any] = {}
        for turn in range(turns + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                begin = time.perf_counter()
                loss = contenders[name]()
                dist.barrier()
                if turn:
                    seconds[name].append(time.perf_counter() - begin)
                if loss is not None:
                    losses[name] = float(loss.detach() if hasattr(loss, "detach") else loss)
        expected = losses.get("one process")
        if expected is not None:
            wrong = {name: loss for name, loss in losses.items() if abs(loss - expected) > TOLERANCE}
            assert not wrong, (expected, wrong)
    return seconds


def main() -> None:
    """Print a table."""
    from colossal.testing import run_processes

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=256)
    given = parser.parse_args()
    found = run_processes(
        compete, 2, given.turns, given.layers, given.width, given.tokens, timeout_seconds=3000,
        environment={"COLOSSAL_BACKEND": "gloo"},
    )[0]  # fmt: skip
    single = statistics.median(found["one process"])
    ideal = single / 2 * (1 + 1 / MICROBATCHES)
    print(f"{'':20s} {'ms':>8s} {'of one / 2':>11s} {'of its torch':>13s}")
    for name, seconds in found.items():
        style = name.split()[-1]
        peer = found.get(f"torch {style}", seconds)
        ratio = statistics.median(a / b for a, b in zip(seconds, peer, strict=True))
        halves = statistics.median(a / b * 2 for a, b in zip(seconds, found["one process"], strict=True))
        print(f"{name:20s} {statistics.median(seconds) * 1e3:8.1f} {halves:11.3f} {ratio:13.3f}")
    one = statistics.median(a / b for a, b in zip(found["ours 1f1b"], found["one process"], strict=True))
    bound = one * 2 / (1 + 1 / MICROBATCHES)
    print(f"1F1B, of (one process / 2) x (1 + 1/{MICROBATCHES}) = {ideal * 1e3:.1f} ms: {bound:.3f} (bar 1.05)")
    floor = statistics.median(a / b for a, b in zip(found["two of one process"], found["one process"], strict=True))
    print(f"two processes that send nothing, of one: {floor:.3f}; 1F1B, of the bound with that: {bound / floor:.3f}")
    v = statistics.median(a / b for a, b in zip(found["ours zbv"], found["ours 1f1b"], strict=True))
    print(f"zero-bubble V, of 1F1B: {v:.3f} (bar below 1)")


if __name__ == "__main__":
    main()
