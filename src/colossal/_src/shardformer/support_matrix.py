"""Which families support which option, computed from the plans."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from colossal._src.shardformer.activation_checkpointing import check_checkpointing
from colossal._src.shardformer.model_options import MODEL_OPTIONS
from colossal._src.shardformer.plans import FAMILIES, plan_of
from colossal._src.tensor import base_model_of
from colossal.errors import PlanError, UnsupportedError

_REFUSED = "refused"
_ONE_LAYER = dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"), 1)


def supported_options(model: nn.Module) -> dict[str, str]:
    """Return which options a model supports, and what implements them.

    Args:
        model: The model, before it is sharded; it is not changed.

    Returns:
        For the name of each option, and for each kind of parallelism, ``"yes"`` or what implements it, such as
        ``"sdpa"`` or ``"torch's"`` for a kernel that torch has anyway; or else ``"refused"``. Sequences are sharded
        over the tp axis in the modes split_gather and ring, and over the sp axis in the modes all_to_all and ring_attn.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from colossal.shardformer import supported_options
        >>> supported_options(GPT2Model(GPT2Config(n_layer=1, n_embd=24, vocab_size=8)))["enable_fused_normalization"]
        "torch's"
    """
    return {name: _word(model, find) for name, find in _COLUMNS.items()}


def option_matrix(families: Iterable[str] = FAMILIES) -> dict[str, dict[str, str]]:
    """Return which options the families support, as their models are built by default.

    Args:
        families: Their names.

    Returns:
        For each family the `supported_options` of a model of it, which is built without data.

    Example:
        >>> from colossal.shardformer import option_matrix
        >>> option_matrix(["bloom"])["bloom"]["enable_flash_attention"]
        'refused'
    """
    return {family: supported_options(_model_without_data(family)) for family in families}


def _model_without_data(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        return AutoModel.from_config(AutoConfig.for_model(family, **_ONE_LAYER))


def _word(model: nn.Module, find: Callable[[nn.Module], str]) -> str:
    try:
        return find(model)
    except (PlanError, UnsupportedError):
        return _REFUSED


def _divides(model: nn.Module) -> str:
    plan, base = plan_of(model), base_model_of(model)
    return "yes" if list(plan.rows(base)) else _REFUSED


def _supports_pipeline(model: nn.Module) -> str:
    stages = plan_of(model).stages
    return "yes" if stages is not None and stages.lists_in(base_model_of(model)) else _REFUSED


def _shards_sequences_over_tp(model: nn.Module) -> str:
    return "yes" if _reads_tokens(model) and plan_of(model).attention else _REFUSED


def _shards_sequences_over_sp(model: nn.Module) -> str:
    return "yes" if _reads_tokens(model) and getattr(model, "_supports_attention_backend", False) else _REFUSED


def _reads_tokens(model: nn.Module) -> bool:
    """Whether the length of sequences is up to the user, and the plan names the layers."""
    stages = plan_of(model).stages
    return stages is not None and stages.previous is None and getattr(model, "main_input_name", None) == "input_ids"


def _checkpoints(model: nn.Module) -> str:
    return "yes" if check_checkpointing(model, plan_of(model)) else _REFUSED


_COLUMNS: Mapping[str, Callable[[nn.Module], str]] = {
    "tensor_parallelism": _divides,
    "pipeline_parallelism": _supports_pipeline,
    "sequence_parallelism_on_tp": _shards_sequences_over_tp,
    "sequence_parallelism_on_sp": _shards_sequences_over_sp,
    **{name: option.check for name, option in MODEL_OPTIONS.items()},
    "gradient_checkpoint_config": _checkpoints,
}
