"""The matrix of model families: one row for each table of the library, and cells that were tried, not typed."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pagebuild.site.landing.texts import labels_of
from pagebuild.site.landing.trial import NO, PLANNED, YES
from pagetest.model.tree import LANGUAGES

if TYPE_CHECKING:
    import torch

WORLD_SIZE = 2

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION |= {"image_size": 32, "patch_size": 8, "initializer_range": 0.02}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "moe_intermediate_size": 16}
_LATENT |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
_FAMILY_CONFIGS: Mapping[str, dict[str, Any]] = {
    "blip-2": {
        "vision_config": _VISION,
        "qformer_config": _VISION,
        "text_config": {"model_type": "opt", "word_embed_proj_dim": 32, "ffn_dim": 64, **_SIZES},
        "num_query_tokens": 2,
        "image_token_index": 1,
    },
    "deepseek_v3": _LATENT,
    "falcon": {"new_decoder_architecture": True},
    "glm": {"head_dim": 8},
    "gptj": {"rotary_dim": 4},
    "qwen3": {"head_dim": 8},
    "sam": {
        "vision_config": _VISION | {"output_channels": 32, "window_size": 2, "num_pos_feats": 16},
        "prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8},
        "mask_decoder_config": {"hidden_size": 32, "num_attention_heads": 4, "mlp_dim": 64},
    },
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
_LENGTHS = {"input_features": 3000}  # of the sound that Whisper hears; everything else is short


def model_matrix() -> dict[str, Any]:
    """Shards a tiny model of every family, and compares the outputs."""
    from colossal.shardformer import FAMILIES

    columns = [{"key": key, "label": labels_of("methods", key), "state": "works"} for key in METHODS]
    return {"columns": columns, "rows": [_row(family) for family in FAMILIES]}


def _row(family: str) -> dict[str, Any]:
    model = tiny_model(family)
    name = type(model).__name__.removesuffix("Model")
    cells = {key: try_method(model) for key, try_method in METHODS.items()}
    return {"key": family, "label": dict.fromkeys(LANGUAGES, name), "page": None, "cells": cells}


def tiny_model(family: str) -> Any:
    """A model of a family, of two layers, which does not draw random numbers."""
    import torch
    from transformers import AutoConfig, AutoModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModel.from_config(AutoConfig.for_model(family, **(_SIZES | _FAMILY_CONFIGS.get(family, {})))).eval()


def try_tensor_parallel(model: Any) -> str:
    """Whether a model that is sharded over two ranks computes what the unsharded one does."""
    from colossal.testing import run_threads

    return _compare_outputs(model, lambda: run_threads(_forward_tensor_parallel, WORLD_SIZE, model))


def try_pipeline_parallel(model: Any) -> str:
    """Whether a model that is split into two stages computes what the full model does."""
    from colossal.shardformer import plan_of

    if plan_of(model).stages is None:
        return PLANNED
    return _compare_outputs(model, lambda: [_forward_pipeline(model)])


def _compare_outputs(model: Any, others: Callable[[], "list[torch.Tensor]"]) -> str:
    import torch

    with torch.no_grad():
        expected = run_model(model)
        found = others()
    return YES if all(torch.allclose(each, expected, rtol=1e-3, atol=1e-4) for each in found) else NO


def run_model(model: Any) -> "torch.Tensor":
    """The output of a model for a batch: its last hidden states, or the logits or masks of a model that has several."""
    return _main_output(model(**make_inputs(model)))


def _main_output(outputs: Any) -> "torch.Tensor":
    return next(outputs[key] for key in ("last_hidden_state", "logits", "pred_masks") if key in outputs)


def make_inputs(model: Any) -> dict[str, "torch.Tensor"]:
    """A batch for a model."""
    import torch

    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 64, (2, 8), generator=draw)
    main, config = model.main_input_name, model.config
    num_queries = getattr(config, "num_query_tokens", 0)
    ids[:, :num_queries] = 1  # where an image goes
    side = getattr(getattr(config, "vision_config", config), "image_size", 0)
    shapes = {
        "input_features": (2, getattr(config, "num_mel_bins", 0), _LENGTHS["input_features"]),
        "pixel_values": (2, 3, side, side),
    }
    inputs = {main: torch.randn(shapes[main], generator=draw) if main in shapes else ids}
    inputs |= {"input_ids": ids} if num_queries else {}
    return inputs | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})


def _forward_tensor_parallel(model: Any) -> "torch.Tensor":
    import copy

    import torch

    from colossal.cluster import ParallelMesh
    from colossal.shardformer import ShardConfig, ShardFormer

    with ParallelMesh(tp=WORLD_SIZE) as mesh, torch.no_grad():
        sharded, _ = ShardFormer(ShardConfig(mesh)).optimize(copy.deepcopy(model))
        return run_model(sharded)


def _forward_pipeline(model: Any) -> "torch.Tensor":
    from colossal._src.pipeline import Stage, copy_structure
    from colossal.pipeline import count_layers, partition_uniform
    from colossal.shardformer import plan_of

    stages = plan_of(model).stages
    assert stages is not None
    layers = partition_uniform(count_layers(model, stages), WORLD_SIZE)
    first, last = (Stage.of_model(copy_structure(model), stages, layers, index) for index in range(2))
    inputs = make_inputs(model)
    return _main_output(last(first(None, inputs), inputs))


METHODS: Mapping[str, Callable[[Any], str]] = {"tensor": try_tensor_parallel, "pipeline": try_pipeline_parallel}
"""What is tried with every family."""
