"""The tables of the families, and which model they are for."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from colossal._src.cluster import ParallelMesh
from colossal._src.shardformer.plans.hf_plan import hf_plan
from colossal._src.tensor import ParallelPlan
from colossal.errors import ConfigError, PlanError

__all__ = ["FAMILIES", "PlanMaker", "check_policy", "plan_of", "read_plan"]

_PLANS = {  # the module and the name of each table, or of what makes it from a configuration
    "bert": "bert.BERT",
    "blip-2": "blip_2.blip_2_plan",
    "bloom": "bloom.BLOOM",
    "cohere": "llama.LLAMA",
    "deepseek_v3": "deepseek_v3.DEEPSEEK_V3",
    "falcon": "falcon.falcon_plan",
    "glm": "llama.GLM",
    "gpt2": "gpt2.GPT2",
    "gptj": "gptj.GPTJ",
    "llama": "llama.LLAMA",
    "mistral": "llama.LLAMA",
    "mixtral": "llama.MIXTRAL",
    "mt5": "t5.T5",
    "olmoe": "llama.OLMOE",
    "opt": "opt.OPT",
    "qwen2": "llama.LLAMA",
    "qwen3": "llama.QWEN3",
    "sam": "sam.SAM",
    "t5": "t5.T5",
    "umt5": "t5.UMT5",
    "vit": "vit.VIT",
    "whisper": "whisper.WHISPER",
}
_SUBMODEL_PLANS = {
    "blip_2_qformer": "blip_2.BLIP_2_QFORMER",
    "blip_2_vision_model": "blip_2.BLIP_2_VISION",
    "sam_vision_model": "sam.SAM_VISION",
}

FAMILIES = tuple(_PLANS)
"""The families that have a table, by the ``model_type`` of their configurations."""


PlanMaker = Callable[[nn.Module, ParallelMesh], ParallelPlan]
"""Makes the plan of a full model for a mesh; the older API's policies do."""


def check_policy(policy: object, name: str = "custom_policy") -> None:
    """Raise if something is passed as a plan that is none, and makes none."""
    is_made = callable(policy) and not isinstance(policy, type)
    if not (policy is None or isinstance(policy, ParallelPlan) or is_made):
        raise ConfigError(
            f"{name} is a ParallelPlan, the table that says how a model is sharded, or a function that makes it from "
            f"the model and the mesh. Found {policy!r}. Pass ParallelPlan(...) of colossal.tensor, or leave it out for "
            "that of the model's family."
        )


def read_plan(policy: ParallelPlan | PlanMaker, model: nn.Module, mesh: ParallelMesh) -> ParallelPlan:
    """Return a plan, or what makes one for a model and a mesh returns."""
    return policy if isinstance(policy, ParallelPlan) else policy(model, mesh)


def is_of_family(plan: ParallelPlan, model: nn.Module) -> bool:
    """Whether a plan is the table of the model's family, which is tested with it."""
    family = str(getattr(getattr(model, "config", None), "model_type", None))
    return family in _PLANS | _SUBMODEL_PLANS and plan.for_stage() == plan_of(model).for_stage()


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
    if place := (_PLANS | _SUBMODEL_PLANS).get(family):
        module, _, name = place.partition(".")
        table = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return table if isinstance(table, ParallelPlan) else table(config)
    found = hf_plan(config)
    if found is None:
        of_family = "" if family == "None" else f"of the family {family!r}, "
        raise PlanError(
            f"A model is divided by the table of its family. Found {type(model).__name__}, {of_family}which has none, "
            "and whose configuration has no plan either. Pass custom_policy=ParallelPlan({'blocks.*.up': 'colwise', "
            "'blocks.*.down': 'rowwise'}) with the names of its modules to the plugin, and for a pipeline also "
            "stages=Stages('blocks', pre_layers=('stem',)), both of colossal.tensor; there are tables for "
            f"{', '.join(FAMILIES)}."
        )
    return found
