# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
"""Frozen weights in few bits: what is replaced and with which settings, and what is refused.

The layers of bitsandbytes are stand-ins that write down what they are told; the real ones run in the GPU test.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate.utils import BnbQuantizationConfig
from torch import nn

from colossal._src.booster.lora import Lora, quantize_with_bitsandbytes
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossal.checkpoint_io import SingleProcessIO
from colossal.errors import ConfigError, UnsupportedError
from colossal.testing import fake_world

GPU = torch.device("cuda")


class Net(nn.Module):
    """Two linear layers and an output; tells where it was moved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4, bias=False))
        self.head = nn.Linear(4, 3)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def to(self, device: torch.device) -> Any:
        self.moved_to = device
        return self


class Layer(nn.Module):
    """A stand-in for a layer of bitsandbytes."""

    def __init__(self, inputs: int, outputs: int, bias: bool, **keywords: Any) -> None:
        super().__init__()
        self.told = {"inputs": inputs, "outputs": outputs, **keywords}
        self.weight: Any = None
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None


class Linear4bit(Layer):
    pass


class Linear8bitLt(Layer):
    pass


def stored(data: torch.Tensor, **keywords: Any) -> Any:
    return SimpleNamespace(data=data, **keywords)


@pytest.fixture
def bitsandbytes(monkeypatch) -> None:
    module = ModuleType("bitsandbytes")
    module.nn = SimpleNamespace(Linear4bit=Linear4bit, Linear8bitLt=Linear8bitLt, Params4bit=stored, Int8Params=stored)
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)


@pytest.mark.usefixtures("bitsandbytes")
def test_four_bits_are_the_default() -> None:
    net = Net()
    first, second = net.body[0], net.body[2]
    quantize_with_bitsandbytes(net, GPU, None)
    assert [type(module) for module in net.body] == [Linear4bit, nn.Tanh, Linear4bit]
    kept = {"compress_statistics": True, "quant_type": "nf4"}
    assert net.body[0].told == {"inputs": 4, "outputs": 6, "compute_dtype": torch.bfloat16, **kept}
    assert net.body[0].bias is first.bias
    assert net.body[2].bias is None
    for new, old in ((net.body[0], first), (net.body[2], second)):
        assert torch.equal(new.weight.data, old.weight)
        assert vars(new.weight) == {"data": new.weight.data, "requires_grad": False, **kept}
    assert type(net.head) is nn.Linear
    assert net.moved_to == GPU
    assert (net.is_loaded_in_4bit, net.is_loaded_in_8bit) == (True, False)


CONFIGURATIONS = {
    "4 bits": (
        transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype="float16"),
        {"compute_dtype": torch.float16, "compress_statistics": False, "quant_type": "fp4"},
    ),
    "8 bits": (
        transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=4.0),
        {"has_fp16_weights": False, "threshold": 4.0},
    ),
    "8 bits of accelerate": (
        BnbQuantizationConfig(load_in_8bit=True),
        {"has_fp16_weights": False, "threshold": 6.0},
    ),
}


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_is_followed(name) -> None:
    config, told = CONFIGURATIONS[name]
    net = Net()
    quantize_with_bitsandbytes(net, GPU, config)
    assert type(net.body[0]) is (Linear4bit if name == "4 bits" else Linear8bitLt)
    assert net.body[0].told == {"inputs": 4, "outputs": 6, **told}
    assert net.is_loaded_in_8bit is (name != "4 bits")


@pytest.mark.usefixtures("bitsandbytes")
def test_the_configuration_says_what_to_skip() -> None:
    net = Net()
    skip = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["body.0"])
    quantize_with_bitsandbytes(net, GPU, skip)
    assert [type(module) for module in (*net.body, net.head)] == [nn.Linear, nn.Tanh, Linear8bitLt, Linear8bitLt]
    everything = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["body.0", "2", "head"])
    with pytest.raises(ConfigError, match="Found none in Net other than the skipped"):
        quantize_with_bitsandbytes(Net(), GPU, everything)
    with pytest.raises(ConfigError, match="Set exactly one of them"):
        quantize_with_bitsandbytes(Net(), GPU, transformers.BitsAndBytesConfig())


def test_what_can_not_be_quantised_says_so(monkeypatch) -> None:
    lora = peft.LoraConfig(target_modules=["0"])
    with pytest.raises(UnsupportedError, match=r"Found the device 'cpu'. Pass quantize=False"):
        Booster(device="cpu").enable_lora(nn.Sequential(nn.Linear(2, 2)), lora_config=lora, quantize=True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UnsupportedError, match="pip install bitsandbytes, or pass quantize=False"):
        quantize_with_bitsandbytes(Net(), GPU, None)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("plugin", "found"),
    [
        (TorchFSDPPlugin, "(?s)under a plugin that shards.*use TorchDDPPlugin"),
        (TorchDDPPlugin, "Found the device 'cpu'"),
    ],
)
def test_plugins_refuse_what_they_can_not_do(plugin, found, rank) -> None:
    lora = peft.LoraConfig(target_modules=["0"])
    with fake_world(2, rank), pytest.raises(UnsupportedError, match=found):
        Booster(device="cpu", plugin=plugin()).enable_lora(nn.Sequential(nn.Linear(2, 2)), None, lora, None, True)


class Halves:
    """A quantizer that any device can run."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def quantize(self, model: nn.Module, device: torch.device, config: Any) -> None:
        self.told.append((device.type, config))
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()


def test_adapters_stand_beside_the_quantised_weights() -> None:
    quantizer, settings = Halves(), object()
    model = Lora(SingleProcessIO(), quantizer=quantizer.quantize).enable(
        nn.Sequential(nn.Linear(4, 4)), torch.device("cpu"), None, peft.LoraConfig(target_modules=["0"]), settings, True
    )
    assert quantizer.told == [("cpu", settings)]
    dtypes = {name.split(".")[-2]: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {"base_layer": torch.bfloat16, "default": torch.float32}


@pytest.mark.gpu
def test_four_bits_train_on_a_gpu() -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    booster = Booster(device="cuda")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = booster.enable_lora(transformers.LlamaForCausalLM(config), lora_config=lora, quantize=True)
    before = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    tokens = torch.randint(64, (4, 16), device="cuda")
    losses = []
    for _ in range(8):
        loss = model(tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    after = model.unwrap().model.layers[0].self_attn.q_proj.base_layer.weight
    assert after.dtype == torch.uint8
    assert torch.equal(after, before)
