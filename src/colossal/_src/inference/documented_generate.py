"""`generate` by the keywords of earlier versions: prompts with ids, and texts that come back."""

from collections.abc import Iterable, Sequence
from typing import Any

from colossal._src.inference.preparation import NewRequest
from colossal._src.inference.requests import RequestOutput
from colossal.errors import ConfigError


def requests_of(tokenizer: Any, request_ids: Any, prompts: Any, token_ids: Any, config: Any) -> list[NewRequest]:
    """Read the arguments; without prompts there are no new requests."""
    if tokenizer is None:
        raise ConfigError(
            "With keywords generate returns texts. Found an engine without a tokenizer. Pass the engine one, or pass "
            "prompts without a keyword: generate(prompts, parameters)."
        )
    texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
    contents: list[Any] = texts if token_ids is None else _lists(token_ids)
    ids = [None] * len(contents) if request_ids is None else _as_list(request_ids)
    for name, found in (("request_ids", ids), ("prompts", texts if prompts is not None else contents)):
        if len(found) != len(contents):
            raise ConfigError(
                f"There are as many {name} as prompts. Found {len(found)} for {len(contents)}. Pass one for each, or "
                "leave them out."
            )
    return [(request_id, content, config) for request_id, content in zip(ids, contents, strict=True)]


def texts_of(tokenizer: Any, outputs: Iterable[RequestOutput], return_token_ids: bool) -> Any:
    """Return texts of prompts with their outputs, and tokens of outputs if they are asked for."""
    in_order = sorted(outputs, key=lambda output: (isinstance(output.request_id, str), output.request_id))
    found = [(output.prompt_token_ids, each.token_ids) for output in in_order for each in output.outputs]
    texts = [tokenizer.decode([*prompt, *tokens], skip_special_tokens=True) for prompt, tokens in found]
    return (texts, [list(tokens) for _, tokens in found]) if return_token_ids else texts


def _lists(token_ids: Any) -> list[list[int]]:
    """Tokens of each prompt, of a tensor, an array, or lists or tensors in a list."""
    rows = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if rows and isinstance(rows[0], int):
        return [rows]
    return [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
