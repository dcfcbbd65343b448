"""Falcon, with a key and a value for each head, or for each group of heads."""

from typing import Any

from colossal.errors import UnsupportedError
from colossal.tensor import HeadCounts, ParallelPlan, Stages


def plan(config: Any) -> ParallelPlan:
    """Return the plan of a configuration."""
    if config.multi_query and not config.new_decoder_architecture:
        raise UnsupportedError(
            "Tensor parallelism divides a Falcon whose keys belong to a head or to a group of heads. Found "
            "multi_query=True, where all heads have one key, packed behind the queries. Use data parallelism, such as "
            "GeminiPlugin."
        )
    numbers = ("num_heads", "num_kv_heads", "hidden_size", "split_size")
    return ParallelPlan(
        styles={
            "word_embeddings": "vocab",
            "h.*.self_attention.query_key_value": "col",
            "h.*.self_attention.dense": "row",
            "h.*.mlp.dense_h_to_4h": "col",
            "h.*.mlp.dense_4h_to_h": "row",
        },
        beside={"lm_head": "head"},
        divide_by_tp=tuple(f"h.*.self_attention.{name}" for name in numbers),
        counts=(HeadCounts(), *((HeadCounts("num_kv_heads"),) if config.new_decoder_architecture else ())),
        cut_inputs={"h.*.self_attention": ("alibi", "attention_mask")} if config.alibi else {},
        stages=Stages("h", first=("word_embeddings",), gives_tuple=True),
    )
