"""Falcon, with a key and a value for each head, for each group of heads, or for all heads."""

from typing import Any

from colossal._src.tensor import HeadCounts, ParallelPlan, Stages


def falcon_plan(config: Any) -> ParallelPlan:
    """Return the plan of a configuration, which says how many keys and values there are."""
    has_one_key = config.multi_query and not config.new_decoder_architecture
    numbers = ("num_heads", "hidden_size", "split_size", *(() if has_one_key else ("num_kv_heads",)))
    heads = HeadCounts(attention="h.*.self_attention" if has_one_key else None)  # Falcon-7B has 71, a prime number
    return ParallelPlan(
        styles={
            "word_embeddings": "vocab",
            "h.*.self_attention.query_key_value": "colwise_multi_query" if has_one_key else "colwise",
            "h.*.self_attention.dense": "rowwise",
            "h.*.mlp.dense_h_to_4h": "colwise",
            "h.*.mlp.dense_4h_to_h": "rowwise",
        },
        head_styles={"lm_head": "lm_head"},
        divide_by_tp=tuple(f"h.*.self_attention.{name}" for name in numbers),
        counts=(heads, *((HeadCounts("num_kv_heads"),) if config.new_decoder_architecture else ())),
        split_inputs={"h.*.self_attention": ("alibi", "attention_mask")} if config.alibi else {},
        stages=Stages("h", pre_layers=("word_embeddings",), layer_outputs=("hidden_states", "")),
        attention="h.*.self_attention",
    )
