"""A Llama block on tensor-parallel ranks, forward and backward: ShardFormer's, DTensor's, and transformers' own.

All three are one `LlamaModel` of one layer with the same weights, given hidden states. DTensor's has `ColwiseParallel`
and `RowwiseParallel` layers, transformers' is loaded by ``from_pretrained(..., tp_plan="auto")``. Turns alternate in an
order that changes. Before anything is timed, outputs and all gradients must be equal. The bars, for two ranks that talk
through gloo: at most 0.6 of either peer's time for 32 tokens, and 0.85 for 512. On our backend for ranks of one host,
where the peers run on it too: at most 15 ms for 32 tokens.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 benchmarks/tensor_parallel_transformers.py --backend gloo
"""

import argparse
import copy
import logging
import os
import random
import statistics
import tempfile
from typing import Any

import torch
from tensor_parallel_mlp import seconds, step_of
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaModel

import colossal
from colossal.cluster import ParallelMesh
from colossal.comm import CommCounter
from colossal.shardformer import ShardConfig, ShardFormer

HIDDEN, HEADS = 256, 8
TOKENS = {32: 0.6, 512: 0.85}  # and the bar
MOST_MILLISECONDS = 15.0


class Block(nn.Module):
    """Takes hidden states, and returns them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the model without its embeddings."""
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


def native_model() -> LlamaModel:
    """The model, the same on all ranks."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 4 * HIDDEN, "vocab_size": 64}
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=HEADS, max_position_embeddings=1024, **sizes)
    return LlamaModel(config).train()


def models(mesh: ParallelMesh) -> dict[str, Block]:
    """The three, with the same weights."""
    native, tp = native_model(), mesh.device_mesh["tp"]
    ours, _ = ShardFormer(ShardConfig(mesh)).optimize(copy.deepcopy(native))
    column = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attn") | dict.fromkeys(("gate_proj", "up_proj"), "mlp")
    plan: dict[str, Any] = {f"{parent}.{name}": ColwiseParallel() for name, parent in column.items()}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    dtensor = copy.deepcopy(native)
    parallelize_module(dtensor.layers[0], tp, plan)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)  # of all ranks, the first alone saves
        native.save_pretrained(shared[0])
        dist.barrier()
        theirs = LlamaModel.from_pretrained(shared[0], tp_plan="auto", device_mesh=tp).train()
        dist.barrier()
    return {"colossal": Block(ours), "DTensor": Block(dtensor), "transformers": Block(theirs)}


def results(model: Block, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a step leaves: the output, and the gradients, of which this rank has parts."""
    output = step_of(model, x)()
    assert x.grad is not None
    found = {"output": output.detach(), "input": x.grad.clone()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            found[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
    return found


def check(made: dict[str, Block], x: torch.Tensor) -> None:
    """All of them compute the same, which is what one process computes."""
    whole = results(Block(native_model()), x)
    ours, *others = (results(model, x) for model in made.values())
    for name in ("output", "input"):
        torch.testing.assert_close(ours[name], whole[name], rtol=1e-4, atol=1e-4)
    assert ours.keys() == whole.keys()
    for other in others:
        assert other.keys() == ours.keys()
        for name, value in ours.items():
            torch.testing.assert_close(
                other[name], value, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: name + text
            )


def measure(made: dict[str, Block], tokens: int, options: argparse.Namespace, rank: int) -> None:
    """Print a line for each of the three."""
    x = torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    check(made, x)
    steps = {key: step_of(model, x) for key, model in made.items()}
    with CommCounter() as counter:
        steps["colossal"]()
    times: dict[str, list[float]] = {key: [] for key in steps}
    order = random.Random(0)  # noqa: S311 (the same on all ranks)
    for turn in range(options.turns + 2):
        for key in order.sample(sorted(steps), len(steps)):
            taken = seconds(steps[key], options.repeats)
            if turn > 1:
                times[key].append(taken)
    slowest = torch.tensor([times[key] for key in steps])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if rank:
        return
    print(f"{tokens} tokens of {HIDDEN} features; colossal starts {sum(counter.calls.values())} collectives")
    for key, row in zip(steps, slowest, strict=True):
        ratios = (slowest[0] / row).tolist()
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {key:<14}{1e3 * statistics.median(row.tolist()):>9.2f} ms   colossal takes "
            f"{statistics.median(ratios):.3f} of it ({low:.3f} to {high:.3f}; bar {TOKENS[tokens]})"
        )


def main() -> None:
    """Measure both numbers of tokens."""
    parser = argparse.ArgumentParser(description="A tensor-parallel Llama block beside its peers.")
    parser.add_argument("--turns", type=int, default=40, help="turns in which each of the three is timed once")
    parser.add_argument("--repeats", type=int, default=5, help="steps timed together")
    parser.add_argument("--backend", default=None, help="of the collectives; the fastest one by default")
    options = parser.parse_args()
    colossal.launch_from_torch(backend=options.backend, verbose=False)
    logging.disable(logging.WARNING)
    mesh = ParallelMesh(tp=int(os.environ["WORLD_SIZE"]))
    made = models(mesh)
    if mesh.global_rank == 0:
        bar = f"; the bar for 32 tokens is {MOST_MILLISECONDS:g} ms" if dist.get_backend() == "shm" else ""
        print(f"{mesh.size('tp')} ranks, {dist.get_backend()}, forward and backward{bar}")
    for tokens in TOKENS:
        measure(made, tokens, options, mesh.global_rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
