"""A loss that the program has given a model takes the logits of all entries and tokens, or is refused by name."""

from typing import Any

import pytest
import torch
from families import VOCAB, build, inputs_of
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import fake_world, run_threads

AXES: dict[str, dict[str, Any]] = {
    "tp": {},
    "sp": {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
}


def penalty(logits: torch.Tensor, labels: torch.Tensor, **_others: Any) -> torch.Tensor:
    return logits.square().mean() + logits[labels == int(labels[0, 0])].logsumexp(-1).mean()


def shard(axis: Any, model: Any) -> Any:
    mesh: Any = {axis: 2}
    return ShardFormer(ShardConfig(ParallelMesh(**mesh), **AXES[axis])).optimize(model)[0]


def losses(axis: str) -> dict[str, Any]:
    batch, model = inputs_of("llama"), build("llama")
    model.loss_function = penalty  # pyright: ignore[reportArgumentType]
    own = shard(axis, model)
    loss = own(**batch).loss
    loss.backward()
    grad = own.model.norm.weight.grad
    sharded = shard(axis, build("llama"))
    logits = sharded(input_ids=batch["input_ids"]).logits
    called = sharded.loss_function(logits=logits, labels=batch["labels"], vocab_size=VOCAB)
    sharded.loss_function = penalty
    with pytest.raises(UnsupportedError, match="Found another one, penalty, set after boost"):
        sharded(**batch)
    return {"loss": loss.detach(), "grad": grad, "called": called.detach()}


@pytest.mark.parametrize("axis", AXES)
def test_a_loss_of_the_program_sees_all_logits(axis: str) -> None:
    batch, model = inputs_of("llama"), build("llama")
    plain: Any = build("llama")
    model.loss_function = penalty  # pyright: ignore[reportArgumentType]
    loss = model(**batch).loss
    loss.backward()
    norm: Any = model.get_submodule("model.norm")
    for found in run_threads(losses, 2, axis):
        torch.testing.assert_close(found["loss"], loss.detach())
        torch.testing.assert_close(found["grad"], norm.weight.grad)
        torch.testing.assert_close(found["called"], plain(**batch).loss.detach(), rtol=1e-6, atol=0)


class WithPenalty(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        outputs: Any = super().forward(*args, **kwargs)
        outputs.loss = outputs.loss + 0.1 * outputs.logits.logsumexp(-1).square().mean()
        return outputs


class WithValue(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, labels: Any = None, **_others: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = self.lm_head(hidden)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss + self.model.norm.weight.square().mean(), logits=logits)


def model_of(kind: Any) -> Any:
    model: Any = build("llama")
    model.__class__ = kind
    return model


def losses_of_forward() -> list[torch.Tensor]:
    batch = inputs_of("llama")
    with pytest.raises(UnsupportedError, match="logsumexp needs the logits of all .* Pass parallel_output=False"):
        shard("tp", model_of(WithPenalty))(**batch)
    config = ShardConfig(ParallelMesh(tp=2), parallel_output=False)
    gathered, _ = ShardFormer(config).optimize(model_of(WithPenalty))
    return [gathered(**batch).loss.detach(), shard("tp", model_of(WithValue))(**batch).loss.detach()]


def test_a_forward_method_of_the_program_sees_marked_logits() -> None:
    expected = [model_of(kind)(**inputs_of("llama")).loss.detach() for kind in (WithPenalty, WithValue)]
    for found in run_threads(losses_of_forward, 2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_stages_do_not_take_what_is_set_after_boost() -> None:
    with fake_world(2):
        plugin = HybridParallelPlugin(1, 2, precision="fp32", num_microbatches=2)
        model, *_ = Booster(device="cpu", plugin=plugin).boost(build("llama").float())
        own: Any = model.unwrap()
        with pytest.raises(UnsupportedError, match="use loss_function of the model before it is boosted"):
            own.loss_function = penalty
        with pytest.raises(AttributeError, match="use resize_token_embeddings of the model before it is boosted"):
            own.resize_token_embeddings(VOCAB + 5)
        assert own.model is own.stages[0].module.model
        with pytest.raises(AttributeError, match=r"model\.unwrap\(\)\.stages\[0\]\.module\.lm_head, with the layers"):
            _ = own.lm_head  # of the last stage
        assert len(own.stages[0].module.model.layers) == 2
        own.name_of_run = "first"  # what no stage has is the program's
        assert own.name_of_run == "first"
        assert own.eval().training is False
