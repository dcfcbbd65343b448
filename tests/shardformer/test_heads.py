# pyright: reportAttributeAccessIssue=false
"""Every class of every family that transformers ships: a step on two ranks equals one on one process."""

import copy
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from divided import assert_grads, whole_grads
from equality import assert_equal
from families import BLIP_2, CALM, DEEPSEEK, FALCON, GPT, LLAMA, MODELS, MOE, OPT, PAIRED, SAM, T5, VIT, VOCAB, WHISPER
from float64 import KeepFloat64
from torch import nn
from transformers import PreTrainedModel

from colossal.cluster import ParallelMesh
from colossal.shardformer import FAMILIES, ShardConfig, ShardFormer
from colossal.testing import run_threads

pytestmark = pytest.mark.slow

LENGTH = 8
OF_A_WHOLE = ("SequenceClassification", "ImageClassification", "AudioClassification", "NextSentencePrediction")
READS_TEXT = ("Blip2ForImageTextRetrieval", "Blip2TextModelWithProjection")
SIZES: dict[str, dict[str, Any]] = {
    "bert": LLAMA | CALM,
    "blip-2": BLIP_2 | {"text_config": OPT | {"model_type": "opt"}},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB},
    "deepseek_v3": DEEPSEEK,
    "falcon": FALCON | {"multi_query": False},
    "glm": PAIRED | {"head_dim": 16},
    "gpt2": GPT,
    "gptj": GPT | {"rotary_dim": 8},
    "mixtral": PAIRED | {"num_local_experts": 4},
    "mt5": T5 | {"decoder_start_token_id": 0},
    "olmoe": MOE,
    "opt": OPT,
    "qwen3": PAIRED | {"head_dim": 16},
    "sam": SAM,
    "t5": T5 | {"decoder_start_token_id": 0},
    "umt5": T5 | {"decoder_start_token_id": 0},
    "vit": VIT | {"encoder_stride": 8},
    "whisper": WHISPER,
}


def classes_of(family: str) -> Iterator[type[PreTrainedModel]]:
    """The classes that a family exports."""
    name = family.replace("-", "_")
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    for each in module.__all__:
        kind = getattr(module, each)
        if issubclass(kind, PreTrainedModel) and not each.endswith("PreTrainedModel"):
            yield kind


CLASSES = {kind.__name__: (family, kind) for family in FAMILIES for kind in classes_of(family)}


def build(name: str) -> nn.Module:
    family, kind = CLASSES[name]
    sizes = SIZES.get(family, PAIRED)
    own: Any = kind.config_class
    if name in READS_TEXT:
        sizes = sizes | {"qformer_config": sizes["qformer_config"] | {"use_qformer_text_input": True}}
    if own.model_type != family:  # of a part, such as the vision model
        sizes = next(sizes[key] for key in sizes if key.endswith("_config") and key.split("_")[0] in own.model_type)
        sizes = sizes | {"encoder_hidden_size": 64}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = own(**sizes, **({} if "pad_token_id" in sizes else {"pad_token_id": 0}))
        model: Any = kind(config).double()
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.1)  # what is zero would hide what is done with it
    if family in ("mixtral", "olmoe", "deepseek_v3"):
        model.set_experts_implementation("eager")  # others have no float64
    return model.eval()


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    """What the forward method of a class takes."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=draw)
    two = torch.tensor([0, 1])
    images = torch.randn(2, 3, 32, 32, generator=draw).double()
    known: dict[str, torch.Tensor] = {
        "input_ids": ids,
        "encoder_hidden_states": torch.randn(2, 5, 64, generator=draw).double(),
        "decoder_input_ids": ids.flip(0),
        "pixel_values": images,
        "input_features": torch.randn(2, 16, 64, generator=draw).double(),
        "query_embeds": torch.randn(2, 3, 64, generator=draw).double(),
        "input_points": 32 * torch.rand(2, 1, 3, 2, generator=draw).double(),
        "start_positions": two + 1,
        "end_positions": two + 3,
        "next_sentence_label": two,
        "labels": ids,
    }
    if name.endswith("T5ForSequenceClassification"):
        known |= {"input_ids": ids.index_fill(1, torch.tensor(LENGTH - 1), 1), "labels": two}  # they end
    elif name.endswith(
        ("SequenceClassification", "ImageClassification", "AudioClassification", "NextSentencePrediction")
    ):
        known["labels"] = two
    elif name.endswith("TokenClassification"):
        known["labels"] = ids % 2
    elif name.endswith("MultipleChoice"):
        known |= {"input_ids": torch.stack([ids, ids.flip(0)], 1), "labels": two}
    elif name.startswith("Blip2For") or name == "Blip2Model":
        known["input_ids"] = torch.where(torch.arange(LENGTH) < 3, 1, ids)
        del known["decoder_input_ids"], known["labels"]
        known["attention_mask"] = torch.ones_like(ids)
    elif name.startswith("Sam"):
        del known["input_ids"]
    elif name == "ViTForMaskedImageModeling":
        known["bool_masked_pos"] = torch.arange(16).repeat(2, 1) % 2 == 0
    if name != "Blip2QFormerModel":
        del known["encoder_hidden_states"]
    taken = inspect.signature(CLASSES[name][1].forward).parameters
    return {key: value for key, value in known.items() if key in taken}


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor) and outputs.is_floating_point():
        yield outputs
    elif isinstance(outputs, tuple | list):
        for each in outputs:
            yield from tensors_in(each)
    elif hasattr(outputs, "to_tuple"):
        yield from tensors_in(outputs.to_tuple())


def step(name: str, model: nn.Module) -> list[torch.Tensor]:
    """Go forward and backward; the loss of a class without one is a mean of its outputs."""
    with KeepFloat64():
        outputs = model(**inputs_of(name))
    found = list(tensors_in(outputs))
    loss = getattr(outputs, "loss", None)
    assert found
    (sum(each.square().mean() for each in found) if loss is None else loss).backward()
    return [each.detach() for each in found]


def step_divided(name: str, model: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None], int]:
    with ParallelMesh(tp=2) as mesh:
        own, _ = ShardFormer(ShardConfig(mesh, parallel_output=False)).optimize(copy.deepcopy(model))
        found = step(name, own)
        return found, whole_grads(own, mesh), sum(parameter.numel() for parameter in own.parameters())


@pytest.mark.parametrize("name", CLASSES)
def test_equals_one_process(name: str) -> None:
    model = build(name)
    alone = copy.deepcopy(model)
    expected = step(name, alone)
    total = sum(parameter.numel() for parameter in alone.parameters())
    for found, grads, numel in run_threads(step_divided, 2, name, model):
        assert numel < 0.9 * total, "hardly anything was divided"
        for index, (output, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_equal(output, wanted, f"output {index}")
        assert_grads(grads, alone)


def test_no_class_is_forgotten() -> None:
    assert {kind for kind, _ in MODELS.values()} - set(CLASSES) == {
        "GemmaForCausalLM",
        "OlmoForCausalLM",
        "Starcoder2ForCausalLM",
    }, "families without a table"
    assert len(CLASSES) > 80
