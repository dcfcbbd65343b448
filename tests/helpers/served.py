"""A small model with a tokenizer of bytes, and its server in this process, without a port."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import torch
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from colossal._src.inference.server.app import make_app
from colossal._src.inference.server.service import Service, start_service
from colossal._src.inference.server.settings import ServerSettings
from colossal.inference import InferenceConfig, InferenceEngine

END = "<end>"
CHAT_TEMPLATE = (
    "{% for each in messages %}{% if each.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ each.role }}>{{ each.content }}{% endfor %}<assistant>"
)


@cache
def build_tokenizer() -> Any:
    """A token for each byte, and one for the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoding: Any = Tokenizer(models.BPE({END: 0} | {byte: 1 + index for index, byte in enumerate(alphabet)}, []))
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=encoding, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@cache
def build_model(positions: int = 256) -> Any:
    """A model whose greedy outputs do not repeat themselves: strong weights in float64, its head not tied."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": positions, "vocab_size": len(build_tokenizer())}
    config: Any = LlamaConfig(eos_token_id=0, bos_token_id=None, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
            model.lm_head.weight[0] = 0  # outputs end where they are told to
    return model


def build_engine(**options: Any) -> InferenceEngine:
    """An engine of the model and its tokenizer."""
    sizes: dict[str, Any] = {"max_input_len": 64, "max_output_len": 64, "max_batch_size": 4}
    return InferenceEngine(build_model(), build_tokenizer(), InferenceConfig(**sizes | options))


def expected_text(prompt: str, max_tokens: int) -> str:
    """What the model continues a text with, alone and greedily."""
    ids = torch.tensor([build_tokenizer()(prompt)["input_ids"]])
    found = build_model().generate(ids, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    return build_tokenizer().decode(found[0, ids.shape[1] :], skip_special_tokens=True)


@contextmanager
def serving(engine: InferenceEngine | None = None, **settings: Any) -> Iterator[tuple[Service, FastAPI]]:
    """Serve the model."""
    with start_service(engine or build_engine(), ServerSettings(model_name="tiny", **settings)) as service:
        yield service, make_app(service)


def ask(app: FastAPI, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with a client of a server."""

    async def run() -> Any:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await work(client)

    return asyncio.run(run())


def post(app: FastAPI, path: str, **body: Any) -> httpx.Response:
    """Send one request."""
    return ask(app, lambda client: client.post(path, json=body))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that a thread does."""
    while not condition():  # noqa: ASYNC110 (the thread sets no event)
        await asyncio.sleep(0.002)
