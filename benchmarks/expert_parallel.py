"""A Mixtral block whose experts are sharded over ranks, forward and backward, beside transformers' expert parallelism.

Both are one block with the same weights, a router and its experts, computed by the experts implementation `grouped_mm`.
transformers exchanges tokens by its all-to-all on gloo, as it does on CPUs; ours talks through our backend for ranks of
one host, or through gloo with --backend gloo. Each rank has its own tokens. Before anything is timed, outputs and all
gradients must be equal. A third way only multiplies the rows that each expert got by its weights, forward and backward:
no exchange could be faster. The bar, for two ranks: at most 0.7 of transformers' time.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 benchmarks/expert_parallel.py
"""

import argparse
import copy
import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pairs import take_turns
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import MixtralConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import colossal
from colossal.cluster import DistCoordinator, ParallelMesh
from colossal.nn.moe import dispatch, shard_experts

BAR = 0.7
WIDTH = 256
SIZES = {"8 experts, 2 of them, 512 wide": (8, 2, 512), "64 experts, 8 of them, 128 wide": (64, 8, 128)}
PLAN = {
    "experts.gate_up_proj": "grouped_gemm",
    "experts.down_proj": "grouped_gemm",
    "experts": "ep_dispatch_experts",
}
Step = Callable[[], torch.Tensor]


def native_block(num_experts: int, num_choices: int, inner: int) -> MixtralSparseMoeBlock:
    """The block, the same on all ranks."""
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": inner, "num_local_experts": num_experts}
    config = MixtralConfig(num_experts_per_tok=num_choices, **sizes)
    config._experts_implementation = "grouped_mm"  # noqa: SLF001 (as models of transformers set it)
    torch.manual_seed(0)
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.05)
    return block


def shard_by_transformers(block: nn.Module) -> nn.Module:
    """Shard the experts as a model of transformers does with ep_size and without tp_size."""
    ranks = list(range(dist.get_world_size()))
    groups: list[Any] = [dist.new_group(some, backend="gloo") for some in (ranks, *([rank] for rank in ranks))]
    ep = DeviceMesh.from_group(groups[0], "cpu", mesh=ranks, mesh_dim_names=("ep",))
    rank = dist.get_rank()
    tp = DeviceMesh.from_group(groups[1 + rank], "cpu", mesh=[rank], mesh_dim_names=("tp",))
    return apply_expert_parallelism(block, ep, tp, PLAN, "all_to_all")


def products_of(block: Any, sharded: Any, x: torch.Tensor, mesh: ParallelMesh) -> Step:
    """What no exchange could avoid: the products of the rows that came here, forward and backward."""
    with torch.no_grad():
        arrived = dispatch(x.view(-1, WIDTH), block.gate(x)[2], block.gate.num_experts, mesh)
        up, down = sharded.experts.gate_up_proj.data, sharded.experts.down_proj.data
        inner = torch.randn(len(arrived.rows), down.shape[2])

    def multiply() -> torch.Tensor:
        for rows, hidden, gate_up, out in zip(
            arrived.rows.split(arrived.counts), inner.split(arrived.counts), up, down, strict=True
        ):
            product = rows @ gate_up.T
            torch.mm(hidden, out.T)
            torch.mm(rows, out)
            torch.mm(rows.T, hidden)
            torch.mm(product, gate_up)
            torch.mm(product.T, rows)
        return torch.zeros(())

    return multiply


def step_of(block: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> Step:
    """Run forward and backward, and return a sum over the output."""

    def step() -> torch.Tensor:
        x.grad = None
        for parameter in block.parameters():
            parameter.grad = None
        output = block(x)
        output.backward(grad)
        return output.detach().sum()

    return step


def check(ours: nn.Module, theirs: nn.Module, x: torch.Tensor) -> None:
    """Both compute the same."""
    values: list[dict[str, torch.Tensor]] = []
    for block in (ours, theirs):
        step_of(block, x, torch.ones_like(x))()
        grads = {name: parameter.grad for name, parameter in [*block.named_parameters(), ("input", x)]}
        local = {
            name: grad.to_local() if isinstance(grad, DTensor) else grad
            for name, grad in grads.items()
            if grad is not None
        }
        values.append({name: grad.clone() for name, grad in local.items()})
    assert values[0].keys() == values[1].keys()
    for name, value in values[0].items():
        torch.testing.assert_close(values[1][name], value, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: n + text)


def compare(_turn: int, sums: Mapping[str, torch.Tensor]) -> None:
    """Tokens and weights do not change, and so no sum does."""
    torch.testing.assert_close(sums["colossal"], sums["transformers"], rtol=1e-3, atol=1e-2)


def measure(name: str, mesh: ParallelMesh, options: argparse.Namespace) -> None:
    """Print the medians of one size."""
    block = native_block(*SIZES[name])
    ours, theirs = copy.deepcopy(block), shard_by_transformers(copy.deepcopy(block))
    ours.experts = shard_experts(ours.experts, mesh, options.exchange)
    draw = torch.Generator().manual_seed(mesh.rank("ep"))
    x = torch.randn(1, options.tokens, WIDTH, generator=draw).requires_grad_()
    check(ours, theirs, x)
    ways = {"colossal": step_of(ours, x, torch.ones_like(x)), "transformers": step_of(theirs, x, torch.ones_like(x))}
    ways["products alone"] = products_of(block, ours, x, mesh)
    times = take_turns(ways, options.turns, options.steps, compare)
    report = [f"{name}; {options.tokens} tokens of {WIDTH} features on each of {mesh.size('ep')} ranks"]
    for way, seconds in times.items():
        ratios = [own / peer for own, peer in zip(seconds, times["transformers"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        bar = f"; bar {BAR}" if way == "colossal" else ""
        median = 1e3 * statistics.median(seconds)
        report.append(f"  {way:<15}{median:9.2f} ms   {middle:.3f} of transformers' ({low:.3f} to {high:.3f}{bar})")
    DistCoordinator().print_on_master("\n".join(report))


def main() -> None:
    """Measure both sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40, help="turns that each way has")
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of one rank")
    parser.add_argument("--exchange", default="all_to_all", choices=("all_to_all", "all_gather"), help="ours")
    parser.add_argument("--backend", default=None, help="of our collectives; the fastest one by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    colossal.launch_from_torch(backend=options.backend, verbose=False)
    logging.disable(logging.WARNING)
    with ParallelMesh(ep=dist.get_world_size()) as mesh:
        DistCoordinator().print_on_master(f"{dist.get_backend()} beside gloo, forward and backward")
        for name in SIZES:
            measure(name, mesh, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
