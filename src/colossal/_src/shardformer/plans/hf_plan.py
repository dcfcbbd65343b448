"""Plans that come with a model of Hugging Face, read as data."""

from collections.abc import Mapping
from typing import Any

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages
from colossal.errors import PlanError

_STYLES: Mapping[str, str] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "colwise_rep": "colwise_gather_output",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated_with_grad_allreduce",
    "moe_tp_experts": "moe_tp_experts",
    "ep_experts": "ep_experts",
}
_EXPERTS = "ep_dispatch_experts"  # of a plan for expert parallelism, whose other rows are the parameters of these
_TABLE = "embedding_rowwise"  # stays replicated; transformers 5.17 has such a row in most plans
_SHARDS_HEADS = ("colwise", "colwise_kv")
_KEY_VALUE = ("k_proj", "v_proj")


def hf_plan(config: Any) -> ParallelPlan | None:
    """Make a plan from the tensor-parallel and the expert-parallel plan of a configuration."""
    rows: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    over_ep: Mapping[str, str] = getattr(config, "base_model_ep_plan", None) or {}
    experts = [name for name, style in over_ep.items() if style == _EXPERTS]
    if not rows and not experts:
        return None
    # what can be sharded over tp too has a row there, and others for its parameters
    rows = dict.fromkeys(experts, "ep_experts") | {name: style for name, style in rows.items() if style != _TABLE}
    of_experts = [name for name, style in rows.items() if style in ("ep_experts", "moe_tp_experts")]
    rows = {name: style for name, style in rows.items() if name.rpartition(".")[0] not in of_experts}
    if experts:  # of which some layers may have none, or all: those have other modules
        rows = {f"?{name}" if ".mlp." in name or name in of_experts else name: style for name, style in rows.items()}
    styles = {name: _style_of(name, style) for name, style in rows.items()}
    shared = "num_key_value_heads" if hasattr(config, "num_key_value_heads") else None
    # a product whose output is gathered, as that of Phi-3 and OLMoE, gives each rank all heads
    is_sharded = any(style in _SHARDS_HEADS for name, style in styles.items() if ".mlp." not in name)
    counts = HeadCounts(key_value_heads=shared, is_sharded=is_sharded)
    attention = {name.rpartition(".")[0] for name in styles if name.endswith("q_proj")}
    module = attention.pop() if len(attention) == 1 else ""
    return ParallelPlan(styles, counts=(counts,), stages=_stages_of(config), attention=module)


def _stages_of(config: Any) -> Stages | None:
    names: list[str] = list(getattr(config, "base_model_pp_plan", None) or ())
    return Stages("layers", pre_layers=tuple(names[: names.index("layers")])) if "layers" in names else None


def _style_of(name: str, style: str) -> str:
    if style not in _STYLES:
        raise PlanError(
            f"A plan of Hugging Face names one of the styles {', '.join(_STYLES)}. Found {style!r} for {name!r}. Pass "
            "a ParallelPlan of your own as the policy."
        )
    return "colwise_kv" if style == "colwise" and name.endswith(_KEY_VALUE) else _STYLES[style]
