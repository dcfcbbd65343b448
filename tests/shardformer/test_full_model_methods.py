"""Methods that take a model for the full one count full tensors, or say what to do."""

from typing import Any

import pytest
from families import VOCAB, build
from torch import nn

from colossal.cluster import ParallelMesh
from colossal.errors import UnsupportedError
from colossal.shardformer import ShardConfig, ShardFormer
from colossal.testing import fake_world


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "bert"])
def test_methods_of_a_sharded_model(name: str) -> None:
    full: Any = build(name)
    with fake_world(2):
        model: Any = ShardFormer(ShardConfig(ParallelMesh(tp=2))).optimize(build(name))[0]
        full.get_input_embeddings().weight.requires_grad_(False)
        model.get_input_embeddings().weight.requires_grad_(False)
        for only_trainable in (False, True):
            for exclude_embeddings in (False, True):
                options = {"only_trainable": only_trainable, "exclude_embeddings": exclude_embeddings}
                assert model.num_parameters(**options) == full.num_parameters(**options)
        with pytest.raises(UnsupportedError, match="which are no torch.nn.Linear.* Call it before boost"):
            model.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
        with pytest.raises(UnsupportedError, match="Found a model whose vocabulary .* Call it before boost"):
            model.resize_token_embeddings(VOCAB + 5)
