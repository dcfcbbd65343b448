"""Ranks that share sequences compute what one process does: losses, logits, every gradient, and causality."""

from typing import Any

import pytest
import torch
from chosen import chosen
from divided import assert_grads, whole_grads
from equality import assert_equal
from families import LENGTH, NOT_CAUSAL, build, inputs_of, results_of
from torch import nn

from colossal import comm
from colossal.cluster import ParallelMesh
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import run_processes

OF_REGISTRY = (
    "llama", "llama-tied", "llama-sequence", "mistral", "mixtral", "qwen2", "qwen3", "cohere", "glm", "gpt2",
    "gpt2-two-heads", "opt", "bert", "bert-tokens", "deepseek", "gemma", "olmo",
    "olmoe",
)  # fmt: skip
OVER_TP = (*OF_REGISTRY, "gptj", "bloom", "falcon", "falcon-alibi", "falcon-one-key", "starcoder2")
SOME = ("llama", "llama-tied", "gpt2", "bert", "mixtral")
WORLDS: dict[str, tuple[int, dict[str, Any], Any, tuple[str, ...]]] = {
    "split_gather": (2, {"tp": 2}, "split_gather", OVER_TP),
    "ring": (2, {"tp": 2}, "ring", OVER_TP),
    "all_to_all": (2, {"sp": 2}, "all_to_all", (*OF_REGISTRY, "gpt-oss")),
    "ring_attn": (2, {"sp": 2}, "ring_attn", OF_REGISTRY),
    "all_to_all-tp": (4, {"sp": 2, "tp": 2}, "all_to_all", SOME),
    "ring_attn-tp": (4, {"sp": 2, "tp": 2}, "ring_attn", SOME),
}


def whole_logits(model: Any, logits: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """Put logits together that stay divided."""
    if not hasattr(model.loss_function, "_sharding"):
        return logits
    if model.loss_function._sharding is not None:
        logits = model.loss_function._sharding.gather(logits)
    return comm.gather(logits, "tp", -1, mesh, length=model.config.vocab_size)


def padded(name: str, num_changed: int = 0) -> dict[str, torch.Tensor]:
    """A batch whose second sequence is shorter."""
    inputs = inputs_of(name, num_changed)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, LENGTH - 3 :] = 0
    labels = inputs["labels"]
    if labels.dim() > 1:
        inputs["labels"] = labels.masked_fill(mask == 0, -100)
    return inputs | {"attention_mask": mask}


def train(world: str, attention: str) -> dict[str, dict[str, Any]]:
    _, axes, mode, names = WORLDS[world]
    mesh = ParallelMesh(**axes)
    config = ShardConfig(mesh, enable_sequence_parallelism=True, sequence_parallelism_mode=mode)
    found = {}
    for name in names:
        for make in (inputs_of, padded):
            model, _ = ShardFormer(config).optimize(build(name, attention))
            loss, logits = results_of(model, make(name))
            loss.backward()
            with torch.no_grad():
                changed = whole_logits(model, results_of(model, make(name, num_changed=1))[1], mesh)
            found[name, make.__name__] = {
                "loss": loss.detach(),
                "grads": whole_grads(model, mesh),
                "logits": whole_logits(model, logits.detach(), mesh),
                "changed": changed,
            }
    return found


IN_GATE = [("all_to_all", "sdpa")]  # the equality matrix has all modes
OTHERS = [*((world, "sdpa") for world in WORLDS if (world, "sdpa") not in IN_GATE), ("all_to_all", "eager")]


@pytest.mark.parametrize(
    ("world", "attention"), [*IN_GATE, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_equals_one_process(world, attention) -> None:
    size, _, _, names = WORLDS[world]
    ranks = run_processes(train, size, world, attention)
    for name in names:
        for make in (inputs_of, padded):
            model = build(name, attention)
            loss, logits = results_of(model, make(name))
            loss.backward()
            for found in (rank[name, make.__name__] for rank in ranks):
                check(f"{world}, {name}, {make.__name__}", found, model, loss, logits, make is padded)
                if name not in NOT_CAUSAL:
                    before = found["logits"][:, : LENGTH - 1]
                    torch.testing.assert_close(found["changed"][:, : LENGTH - 1], before, rtol=0, atol=1e-12)


def check(
    at: str, found: dict[str, Any], model: nn.Module, loss: torch.Tensor, logits: torch.Tensor, is_padded: bool
) -> None:
    """Compare with one process; what a model says of tokens that are padding does not matter."""
    length = LENGTH - 3 if is_padded and logits.dim() > 2 else None
    pairs = {"loss": (found["loss"], loss.detach()), "logits": (found["logits"][:, :length], logits[:, :length])}
    for key, (value, expected) in pairs.items():
        assert_equal(value, expected.detach(), f"{at}, {key}")
    assert_grads(found["grads"], model, f"{at}, ")


FLEX: tuple[tuple[dict[str, Any], Any], ...] = (
    ({"tp": 2}, None),
    ({"tp": 2}, "split_gather"),
    ({"sp": 2}, "all_to_all"),
)


def look(attention: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run models forward only, and once more with another last token."""
    found = []
    for axes, mode in chosen(FLEX, 1, "flex attention"):
        config = ShardConfig(
            ParallelMesh(**axes),
            parallel_output=False,
            enable_sequence_parallelism=mode is not None,
            sequence_parallelism_mode=mode,
        )
        model, _ = ShardFormer(config).optimize(build("llama", attention).float())
        with torch.no_grad():
            found.append(tuple(results_of(model, inputs_of("llama", num_changed=number))[1] for number in (0, 1)))
    return found


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch compiles flex attention for vectors only"
)
def test_flex_attention_is_the_same_forward() -> None:
    """On the CPU torch has no backward pass of it, and no float64."""
    expected = results_of(build("llama").float(), inputs_of("llama"))[1].detach()
    for rank in run_processes(look, 2, "flex_attention"):
        for logits, changed in rank:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(changed[:, : LENGTH - 1], logits[:, : LENGTH - 1])
