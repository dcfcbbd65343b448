"""The tables of the families, and which model they are for."""

import importlib
from typing import Any

from torch import nn

from colossal._src.shardformer.plans.hf_plan import hf_plan
from colossal._src.tensor import ParallelPlan
from colossal.errors import PlanError

__all__ = ["FAMILIES", "plan_of"]

_PLAN_MODULES = {
    "bert": "bert",
    "blip-2": "blip_2",
    "bloom": "bloom",
    "cohere": "llama",
    "deepseek_v3": "deepseek_v3",
    "falcon": "falcon",
    "glm": "glm",
    "gpt2": "gpt2",
    "gptj": "gptj",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "mixtral",
    "mt5": "t5",
    "opt": "opt",
    "qwen2": "llama",
    "qwen3": "qwen3",
    "sam": "sam",
    "t5": "t5",
    "umt5": "t5",
    "vit": "vit",
    "whisper": "whisper",
}

_SUBMODEL_PLANS = {
    "blip_2_qformer": "blip_2",
    "blip_2_vision_model": "blip_2",
    "sam_vision_model": "sam",
}

FAMILIES = tuple(_PLAN_MODULES)
"""The families that have a table, by the ``model_type`` of their configurations."""


def plan_of(model: nn.Module) -> ParallelPlan:
    """Find the table of a model of Hugging Face.

    Args:
        model: The model, of any class of its family.

    Returns:
        Its plan: that of the family, or else that which its configuration has.

    Raises:
        PlanError: There is no table for this family, and its configuration has no plan.

    Example:
        >>> from transformers import GPT2Config, GPT2Model
        >>> from colossal.shardformer import plan_of
        >>> plan_of(GPT2Model(GPT2Config(n_layer=1, n_embd=24, vocab_size=8))).styles["h.*.attn.c_attn"]
        'packed_colwise(3)'
    """
    config: Any = getattr(model, "config", None)
    family = str(getattr(config, "model_type", None))
    name = (_PLAN_MODULES | _SUBMODEL_PLANS).get(family)
    if name is not None:
        return importlib.import_module(f"{__name__}.{name}").plan(config)
    found = hf_plan(config)
    if found is None:
        raise PlanError(
            f"A model is divided by the table of its family. Found {type(model).__name__}, of the family {family!r}, "
            "which has none, and whose configuration has no plan either. Pass a ParallelPlan as the policy; there are "
            f"tables for {', '.join(FAMILIES)}."
        )
    return found
