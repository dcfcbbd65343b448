"""One training step of GPT-2 in bfloat16: ours through the Booster, and peers as their users write it."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from models import FULL, TOY, Shape, batches, build
from torch import distributed as dist

import colossal
from colossal.accelerator import get_accelerator

ADAM: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
Step = Callable[[torch.Tensor], torch.Tensor]


def step_of(
    model: Any,
    optimizer: Any,
    backward: Callable[[torch.Tensor], object] = torch.Tensor.backward,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """Forward inside a context, backward, update."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with context():
            loss = model(input_ids=batch, labels=batch).loss
        backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def ours(
    make_plugin: Callable[[], Any], shape: Shape, is_lazy: bool = False, make_model: Callable[[Shape], Any] = build
) -> Step:
    """A step through the Booster."""
    from colossal.booster import Booster
    from colossal.lazy import LazyInitContext
    from colossal.nn.optimizer import HybridAdam

    colossal.launch_from_torch(verbose=False)
    with LazyInitContext() if is_lazy else nullcontext():
        model = make_model(shape)
    plugin = make_plugin()
    booster = Booster(plugin=plugin, mixed_precision=None if hasattr(plugin, "precision") else "bf16")
    boosted, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), **ADAM))
    assert optimizer is not None
    return step_of(boosted, optimizer, lambda loss: booster.backward(loss, optimizer))


def plugin_of(name: str, **options: Any) -> Callable[[], Any]:
    """Make a plugin when a world has been joined."""
    from colossal.booster import plugin

    return lambda: getattr(plugin, name)(**options)


def joined() -> torch.device:
    """Join the world as a program of torch does."""
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(accelerator.communication_backend)
    return accelerator.get_current_device()


def usual(model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> Step:
    """A step as torch's users write it, with autocast."""
    return step_of(model, optimizer, context=partial(torch.autocast, device.type, torch.bfloat16))


def torch_alone(shape: Shape) -> Step:
    """Each rank for itself."""
    device = joined()
    model = build(shape).to(device)
    return usual(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), device)


def torch_ddp(shape: Shape) -> Step:
    """DistributedDataParallel with autocast."""
    from torch.nn.parallel import DistributedDataParallel

    device = joined()
    model = DistributedDataParallel(build(shape).to(device), gradient_as_bucket_view=True)
    return usual(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM), device)


def torch_fsdp2(shape: Shape, reshard: bool) -> Step:
    """FSDP2, by blocks; parameters in bfloat16 for the passes, sums in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = joined()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = build(shape).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in [*model.transformer.h, model]:
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return step_of(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAM))


def torch_tensor_parallel(shape: Shape) -> Step:
    """DTensor's layers in Megatron's arrangement, on a Llama-like block; all ranks see the same batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device = joined()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = build_llama(shape).to(device)
    names = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attn") | dict.fromkeys(("gate_proj", "up_proj"), "mlp")
    plan: dict[str, Any] = {f"{parent}.{name}": ColwiseParallel() for name, parent in names.items()}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return usual(model, torch.optim.AdamW(model.parameters(), foreach=False, **ADAM), device)


def our_tensor_parallel(shape: Shape) -> Step:
    """HybridParallelPlugin on the same model."""
    size = int(os.environ["WORLD_SIZE"])
    make_plugin = plugin_of("HybridParallelPlugin", tp_size=size, pp_size=1, precision="bf16")
    return ours(make_plugin, shape, make_model=build_llama)


def build_llama(shape: Shape) -> Any:
    """The same Llama on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": shape.width, "intermediate_size": 4 * shape.width}
    sizes |= {"num_hidden_layers": shape.layers, "num_attention_heads": max(shape.width // 64, 2)}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=shape.vocabulary, max_position_embeddings=shape.length))


def deepspeed(shape: Shape, stage: int) -> Step:
    """DeepSpeed with its fused Adam."""
    import importlib

    library = importlib.import_module("deepspeed")
    library.init_distributed(get_accelerator().communication_backend, auto_mpi_discovery=False, verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
    }
    model = build(shape)
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


CONTENDERS: dict[str, Callable[[Shape], Step]] = {
    "torch, no communication": torch_alone,
    "torch DDP": torch_ddp,
    "torch FSDP2": partial(torch_fsdp2, reshard=True),
    "torch FSDP2, not resharded": partial(torch_fsdp2, reshard=False),
    "DTensor tp": torch_tensor_parallel,
    "DeepSpeed ZeRO-1": partial(deepspeed, stage=1),
    "DeepSpeed ZeRO-2": partial(deepspeed, stage=2),
    "DeepSpeed ZeRO-3": partial(deepspeed, stage=3),
    "TorchDDPPlugin": partial(ours, plugin_of("TorchDDPPlugin")),
    "TorchFSDPPlugin": partial(ours, plugin_of("TorchFSDPPlugin")),
    "LowLevelZeroPlugin, stage 1": partial(ours, plugin_of("LowLevelZeroPlugin", stage=1, precision="bf16")),
    "LowLevelZeroPlugin, stage 2": partial(ours, plugin_of("LowLevelZeroPlugin", stage=2, precision="bf16")),
    "GeminiPlugin": partial(ours, plugin_of("GeminiPlugin", precision="bf16"), is_lazy=True),
    "HybridParallelPlugin": partial(
        ours, plugin_of("HybridParallelPlugin", tp_size=1, pp_size=1, zero_stage=1, precision="bf16")
    ),
    "HybridParallelPlugin, tp": our_tensor_parallel,
}
ONE_MODEL = ("DTensor tp", "HybridParallelPlugin, tp")
"""Whose ranks compute one model together, on one batch."""

RACES: dict[str, tuple[str, ...]] = {
    "replicas": ("torch, no communication", "torch DDP", "TorchDDPPlugin"),
    "sharded states": (
        "DeepSpeed ZeRO-1",
        "DeepSpeed ZeRO-2",
        "torch FSDP2, not resharded",
        "LowLevelZeroPlugin, stage 1",
        "LowLevelZeroPlugin, stage 2",
        "HybridParallelPlugin",
    ),
    "sharded parameters": ("DeepSpeed ZeRO-3", "torch FSDP2", "TorchFSDPPlugin", "GeminiPlugin"),
    "tensor parallelism": ONE_MODEL,
}
"""Who runs beside whom; the memory of a device must hold them all."""
PACKAGES = {"DeepSpeed": "deepspeed"}
"""What contenders whose names begin so need."""


def race(contender: str, is_toy: bool, num_steps: int) -> Iterator[dict[str, float]]:
    """Train: the first value is that of warming up, each other one that of a turn.

    Yields:
        ``loss`` of the last step, ``seconds`` of a step, ``peak_bytes`` of the device since the first step.
    """
    shape = TOY if is_toy else FULL
    step = CONTENDERS[contender](shape)
    accelerator = get_accelerator()
    device, loss = accelerator.get_current_device(), torch.zeros(())
    data = batches(shape, device, are_shared=contender in ONE_MODEL)
    while True:
        accelerator.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(num_steps):
            loss = step(next(data))
        accelerator.synchronize()
        seconds = (time.perf_counter() - begin) / num_steps
        yield {"loss": float(loss), "seconds": seconds, "peak_bytes": float(accelerator.max_memory_allocated())}
