# pyright: reportArgumentType=false, reportCallIssue=false
"""Dropout follows the place in the mesh: equal where ranks hold the same activations, else different."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chosen import ALL
from plugins import HYBRID, plugins
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.testing import run_processes

PLUGINS = plugins("DDP", "FSDP", "ZeRO-1", "Gemini", "tp2", "pp2", "tp2 pp2") | {
    "Gemini tp2": plugins("Gemini, tp2")["Gemini, tp2"],
    "dp2": partial(HYBRID, 1, 1),
    "sp2": partial(HYBRID, 1, 1, sp_size=2, enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"),
    "split": partial(HYBRID, 2, 1, enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather"),
}
FULL_NORMS = ("DDP", "dp2", "tp2", "sp2", "split")
IDS = torch.arange(32).view(2, 16)
Seen = dict[str, list[torch.Tensor]]


def boosted(plugin: str) -> tuple[Booster, Any, Any, Seen]:
    """GPT-2 with transformers' own dropout, and what its dropout layers return."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)
    own = GPT2LMHeadModel(config)
    seen: Seen = {}
    for name, module in own.named_modules():
        if name.endswith((".drop", "mlp.dropout", "ln_f")):
            module.register_forward_hook(
                lambda _module, _args, output, name=name: seen.setdefault(name, []).append(output.detach().clone())
            )
    booster = Booster(device="cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    model.train()
    return booster, model, optimizer, seen


def step(booster: Booster, model: Any, optimizer: Any) -> float:
    batch = iter([{"input_ids": IDS, "labels": IDS}])
    loss = booster.execute_pipeline(batch, model, lambda outputs, _: outputs.loss, optimizer)["loss"]
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def seed_and_train(plugin: str) -> tuple[Seen, torch.Tensor, list[torch.Tensor]]:
    """Seed ranks apart after boost, let one draw more than the others, and then all alike."""
    booster, model, optimizer, seen = boosted(plugin)
    torch.manual_seed(100 + torch.distributed.get_rank())
    step(booster, model, optimizer)
    if torch.distributed.get_rank() == 0:
        torch.rand(3)
    step(booster, model, optimizer)
    torch.manual_seed(7)
    step(booster, model, optimizer)
    # what ranks draw by themselves, such as the order of samples, stays that of their seeds
    drawn = torch.rand(3)
    norms = [each.detach().clone() for name, each in model.named_parameters() if "ln_" in name and plugin in FULL_NORMS]
    return seen, drawn, norms


def masks(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [output == 0 for output in outputs]


def agree(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


def train_all(plugins: Sequence[str]) -> dict[str, Any]:
    return {plugin: seed_and_train(plugin) for plugin in plugins}


def test_ranks_draw_as_their_place_says() -> None:
    replicas, tensors, tokens = ("DDP", "FSDP", "ZeRO-1", "Gemini", "dp2"), ("tp2", "Gemini tp2"), ("sp2", "split")
    first, second = run_processes(train_all, 2, [*replicas, *tensors, *tokens, "pp2"])
    for plugin in replicas:
        for name, outputs in first[plugin][0].items():
            assert not any(agree(outputs, second[plugin][0][name])), (plugin, name)
    for plugin in tensors:
        assert first[plugin][0].keys() == second[plugin][0].keys()
        for name, outputs in first[plugin][0].items():
            assert all(agree(outputs, second[plugin][0][name])), (plugin, name)
    for plugin in tokens:
        for name, outputs in first[plugin][0].items():
            equal = agree(masks(outputs), masks(second[plugin][0][name]))
            if "mlp" in name:
                assert not any(equal), (plugin, name)
            elif name.endswith(".drop"):  # of the embeddings, before the tokens are sharded
                assert all(equal), (plugin, name)
    for plugin, (_, drawn, norms) in first.items():
        assert torch.equal(drawn, second[plugin][1]), plugin
        assert all(agree(norms, second[plugin][2])), plugin
    own, other = (each["pp2"][0][f"transformer.h.{i}.mlp.dropout"] for i, each in enumerate((first, second)))
    assert not any(agree(masks(own), masks(other)))


def evaluate_and_train() -> list[torch.Tensor]:
    """Evaluate, which draws nothing, let one rank draw, and train."""
    booster, model, optimizer, seen = boosted("tp2")
    torch.manual_seed(100 + torch.distributed.get_rank())
    model.eval()
    with torch.no_grad():
        model(input_ids=IDS)
    if torch.distributed.get_rank() == 0:
        torch.rand(3)
    seen.clear()
    model.train()
    step(booster, model, optimizer)
    return seen["transformer.drop"]


def test_a_pass_without_draws_leaves_ranks_of_tensor_parallelism_together() -> None:
    first, second = run_processes(evaluate_and_train, 2)
    assert all(agree(first, second))


# ---------------------------------------------------------------------- seeds, repeated passes, resumed runs


def gradients(booster: Booster, model: Any, optimizer: Any, run: Callable[..., Any]) -> list[torch.Tensor]:
    torch.manual_seed(5)
    booster.backward(run(model), optimizer)
    found = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    optimizer.zero_grad()
    return found


def repeat(plugin: str) -> list[bool]:
    """Seed equally before two passes, and checkpoint the activations of the whole model."""
    booster, model, optimizer, _ = boosted(plugin)
    step(booster, model, optimizer)
    loss: Callable[..., Any] = lambda model: model(input_ids=IDS, labels=IDS).loss  # noqa: E731
    want = gradients(booster, model, optimizer, loss)
    return [
        all(agree(want, gradients(booster, model, optimizer, loss))),
        all(agree(want, gradients(booster, model, optimizer, lambda m: checkpoint(loss, m, use_reentrant=False)))),
        not any(agree(want, gradients(booster, model, optimizer, lambda m: (torch.rand(1), loss(m))[1]))[:1]),
    ]


def compiled() -> list[bool]:
    """Compile a boosted model, in place and around it."""
    found: list[torch.Tensor] = []
    modes: Sequence[Callable[[Any], Any]] = (
        lambda model: model,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: (model.compile(backend="eager"), model)[1],
    )
    for compile_model in modes:
        own = nn.Sequential(nn.Linear(4, 64), nn.Dropout())
        model, *_ = Booster(device="cpu", plugin=TorchDDPPlugin()).boost(own)
        run: Any = compile_model(model)
        torch.manual_seed(5)
        found.append(run(torch.ones(3, 4)) == 0)
    return agree([found[0]] * 2, found[1:])


def dropout_of(plugin: str) -> str:
    """A layer that every rank has: in a pipeline, one of its own stage."""
    return f"transformer.h.{torch.distributed.get_rank()}.mlp.dropout" if plugin == "pp2" else "transformer.drop"


def save(plugin: str, folder: str) -> list[torch.Tensor]:
    booster, model, optimizer, seen = boosted(plugin)
    torch.manual_seed(100 + torch.distributed.get_rank())
    step(booster, model, optimizer)
    booster.save(folder, model, optimizer, step=1)
    seen.clear()
    step(booster, model, optimizer)
    return seen[dropout_of(plugin)]


def resume(plugin: str, folder: str) -> list[torch.Tensor]:
    booster, model, optimizer, seen = boosted(plugin)
    torch.manual_seed(200 + torch.distributed.get_rank())
    booster.load(folder, model, optimizer)
    step(booster, model, optimizer)
    return seen[dropout_of(plugin)]


WRITERS, READERS = ("DDP", "tp2", "pp2", "sp2"), ("dp2", "tp2", "pp2", "sp2")
RESUMED = [(old, new) for old in ("one", *WRITERS) for new in READERS]
if not ALL:
    RESUMED = [("one", new) for new in READERS] + list(zip(WRITERS, READERS, strict=True))
    RESUMED += list(zip(WRITERS, READERS[1:] + READERS[:1], strict=True))  # on the same mesh, and on another


def repeat_and_resume(folder: str) -> Any:
    saved = {plugin: save(plugin, f"{folder}/{plugin}") for plugin in WRITERS}
    resumed = {(old, new): resume(new, f"{folder}/{old}") for old, new in RESUMED}
    return {plugin: repeat(plugin) for plugin in ("DDP", "tp2")} | {"compiled": compiled()}, saved, resumed


def save_in_one_process(folder: Path) -> None:
    torch.manual_seed(0)
    booster = Booster(device="cpu")
    own = GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0)
    )
    model, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    booster.save(folder / "one", model, optimizer, step=1)


@pytest.mark.slow
@pytest.mark.chosen
def test_seeds_count_and_resumed_ranks_draw_as_their_place_says(tmp_path: Path) -> None:
    save_in_one_process(tmp_path)
    first, second = run_processes(repeat_and_resume, 2, str(tmp_path))
    for repeated, saved, resumed in (first, second):
        assert repeated == {"DDP": [True] * 3, "tp2": [True] * 3, "compiled": [True] * 2}
        for plugin in ("tp2", "pp2", "sp2"):  # uninterrupted
            assert all(agree(saved[plugin], resumed[plugin, plugin])), plugin
        assert all(agree(saved["DDP"], resumed["DDP", "dp2"]))
    for (old, new), outputs in first[2].items():
        equal = agree(masks(outputs), masks(second[2][old, new]))
        assert all(equal) if new in ("tp2", "sp2") else not any(equal), (old, new)


def test_replicas_of_tensor_parallel_ranks_and_stages_draw_apart() -> None:
    """Ranks of one tensor-parallel group draw alike, those of other replicas and stages do not."""
    ranks = run_processes(train_all, 4, ["tp2", "tp2 pp2"])
    for plugin, layers in (("tp2", (0, 0, 0, 0)), ("tp2 pp2", (0, 0, 1, 1))):
        drawn = [
            masks(rank[plugin][0][f"transformer.h.{i}.mlp.dropout"]) for rank, i in zip(ranks, layers, strict=True)
        ]
        assert all(agree(drawn[0], drawn[1])), plugin
        assert all(agree(drawn[2], drawn[3])), plugin
        assert not any(agree(drawn[0], drawn[2])), plugin
        assert all(torch.equal(ranks[0][plugin][1], rank[plugin][1]) for rank in ranks), plugin
