# pyright: reportAttributeAccessIssue=false
"""Logits of some vocabulary entries are not taken for those of all: what needs all is refused by name."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import VOCAB, build, inputs_of
from torch.nn import functional

from colossal import comm
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.nn import VocabParallelCrossEntropyLoss
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import run_processes, run_threads

NAMES = ("llama", "gpt2")
REFUSED: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "argmax": lambda t, _: t.argmax(-1),
    "softmax": lambda t, _: t.float().softmax(-1),
    "log_softmax": lambda t, _: functional.log_softmax(t[:, :-1], -1),
    "logsumexp": lambda t, _: torch.logsumexp(t, -1),
    "cross_entropy": lambda t, y: functional.cross_entropy(t.view(-1, t.size(-1)), y.flatten() % 4),
    "cross_entropy, transposed": lambda t, y: functional.cross_entropy(t.transpose(1, 2), y % 4),
    "topk": lambda t, _: t.topk(5),
    "max": lambda t, _: t.detach().max(-1),
    "mean": lambda t, _: t.square().mean(),
    "gather": lambda t, y: t.gather(-1, (y % 4)[..., None]),
    "__getitem__": lambda t, _: t[..., 3],
    "sum": lambda t, _: torch.stack([t, t]).sum(),
    "multinomial": lambda t, _: torch.multinomial(t[0].exp(), 1),
    "numpy": lambda t, _: t.detach().numpy(),
    "kl_div": lambda t, _: functional.kl_div(t, t),
    "sort": lambda t, _: t.sort(dim=-1),
    "pickled": lambda t, _: pickle.loads(pickle.dumps(t.detach())).argmax(-1),  # noqa: S301 - of this process
}


def refusals(name: str) -> dict[str, str]:
    found = {}
    with ParallelMesh(tp=2) as mesh:
        model, _ = ShardFormer(ShardConfig(mesh)).optimize(build(name).float())
        batch = inputs_of(name)
        for labels in (None, batch["labels"]):
            for as_dict in (True, False):
                outputs = model(**batch | {"labels": labels}, return_dict=as_dict)
                logits = outputs.logits if as_dict else outputs[labels is not None]
                for what, use in REFUSED.items():
                    with pytest.raises(UnsupportedError) as error:
                        use(logits, batch["labels"])
                    found[what] = str(error.value)
                with pytest.raises(RuntimeError) as shape:
                    logits.view(-1, VOCAB)
                assert "parallel_output=False" in shape.value.__notes__[0]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_needs_all_entries_is_refused(name: str) -> None:
    for found in run_threads(refusals, 2, name):
        for what, message in found.items():
            verb = "argmax" if what == "pickled" else what.partition(",")[0]
            assert message.startswith(f"{verb} needs the logits of all {VOCAB} vocabulary entries. Found those of")
            assert "Pass parallel_output=False" in message


def losses(name: str) -> tuple[float, Any, torch.Tensor]:
    """What works on marked logits: arithmetic, a loss of shards, and gathering them."""
    with ParallelMesh(tp=2) as mesh:
        model, _ = ShardFormer(ShardConfig(mesh)).optimize(build(name))
        batch = inputs_of(name)
        logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
        full = comm.gather(logits * 1.0, "tp", -1, mesh, length=VOCAB)
        assert full.argmax(-1).shape == labels.shape
        assert not (logits + 1).isnan().any()
        joined: Any = torch.cat([logits[:1], logits[1:]])
        assert torch.equal(joined, logits)
        with pytest.raises(UnsupportedError, match="argmax"):
            joined.argmax(-1)
        loss = VocabParallelCrossEntropyLoss()(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        grad = next(module for module in model.modules() if type(module).__name__.endswith("Norm")).weight.grad
        return loss.item(), grad, full.detach()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_computed_of_each_entry_works(name: str) -> None:
    model, batch = build(name), inputs_of(name)
    logits = model(input_ids=batch["input_ids"]).logits
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    grad = next(module for module in model.modules() if type(module).__name__.endswith("Norm")).weight.grad
    for found, found_grad, full in run_threads(losses, 2, name):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        torch.testing.assert_close(found_grad, grad)
        torch.testing.assert_close(full, logits.detach())


def of_stages() -> list[str]:
    """A pipeline returns marked logits of its micro-batches, and a program without labels is refused."""
    plugin = HybridParallelPlugin(2, 2, precision="fp32", num_microbatches=2)
    booster, model = Booster(device="cpu", plugin=plugin), build("llama").float()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = inputs_of("llama")
    done = booster.execute_pipeline(
        iter([batch]), boosted, lambda out, _: out.loss, optimizer, return_loss=True, return_outputs=True
    )
    assert done["loss"].isfinite()
    if done["outputs"] is None:
        return []
    with pytest.raises(UnsupportedError, match="parallel_output=False") as error:
        done["outputs"].logits.argmax(-1)
    return [str(error.value)]


def test_logits_of_a_pipeline_are_marked() -> None:
    assert [len(each) for each in run_processes(of_stages, 4)] == [0, 0, 1, 1]


# ------------------------------------------------------------------------------------------ sharded sequences

OF_ALL_TOKENS = ("argmax", "softmax", "cross_entropy", "mean", "numpy", "multinomial")
MODES = ("all_to_all", "ring_attn")


def tokens_of(mode: Any) -> dict[str, str]:
    """What of a rank's tokens is refused; the loss of labels and gathering work, and gathered logits are plain."""
    found = {}
    with ParallelMesh(sp=2) as mesh:
        options = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": mode}
        batch = inputs_of("llama")
        single: Any = build("llama").float()
        whole = single(**batch)
        model, _ = ShardFormer(ShardConfig(mesh, **options)).optimize(build("llama").float())
        uses = {
            **{name: REFUSED[name] for name in OF_ALL_TOKENS},
            "__getitem__": lambda t, _: t[:, :-1],
            "select": lambda t, _: t.select(1, -1),
        }
        for as_dict in (True, False):
            outputs = model(**batch, return_dict=as_dict)
            torch.testing.assert_close(outputs.loss if as_dict else outputs[0], whole.loss)
            logits = outputs.logits if as_dict else outputs[1]
            for what, use in uses.items():
                with pytest.raises(UnsupportedError) as error:
                    use(logits.float(), batch["labels"])
                found[what] = str(error.value)
            sharding: Any = model.loss_function
            gathered = sharding._sharding.gather(logits.detach() * 1.0)
            torch.testing.assert_close(gathered.argmax(-1), whole.logits.argmax(-1))
        full, _ = ShardFormer(ShardConfig(mesh, parallel_output=False, **options)).optimize(build("llama").float())
        torch.testing.assert_close(full(**batch).logits.softmax(-1), whole.logits.softmax(-1))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_what_needs_all_tokens_is_refused(mode: str) -> None:
    length = inputs_of("llama")["labels"].shape[1]
    for found in run_processes(tokens_of, 2, mode):
        for what, message in found.items():
            assert message.startswith(f"{what} needs the logits of all {length} tokens of a sequence. Found those of")
            assert "Pass parallel_output=False" in message


def tokens_of_stages() -> str:
    """A pipeline returns marked logits; the encoder's hidden states between stages stay plain."""
    plugin = HybridParallelPlugin(
        1, 2, 2, precision="fp32", num_microbatches=2, enable_sequence_parallelism=True,
        sequence_parallelism_mode="all_to_all",
    )  # fmt: skip
    booster, model = Booster(device="cpu", plugin=plugin), build("llama").float()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    done = booster.execute_pipeline(
        iter([inputs_of("llama")]), boosted, lambda out, _: out.loss, optimizer, return_outputs=True
    )
    assert done["loss"].isfinite()
    if done["outputs"] is None:
        return ""
    with pytest.raises(UnsupportedError) as error:
        done["outputs"].logits.argmax(-1)
    return str(error.value)


def test_logits_of_sharded_sequences_in_a_pipeline_are_marked() -> None:
    found = run_processes(tokens_of_stages, 4)
    assert [each.partition(" needs the logits of all ")[0] for each in found] == ["", "", "argmax", "argmax"]
