# pyright: reportArgumentType=false
"""Adapters of divided models train like those that peft alone trains in one process, and peft reads their files."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from equality import RTOL
from families import build, inputs_of
from float64 import KeepFloat64
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn

from colossal._src.testing.processes import PRELOADED
from colossal.booster import Booster
from colossal.booster.plugin import HybridParallelPlugin
from colossal.errors import PlanError, UnsupportedError
from colossal.testing import fake_world, run_processes

PRELOADED.append("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft

STEPS, MAX_NORM = 3, 0.05
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
TARGETS: dict[str, list[str]] = {
    "llama": LLAMA,
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "bert": ["query", "key", "value", "dense"],
    "mixtral": LLAMA[:4],
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
ONLY_TP: dict[str, list[str]] = {
    "t5": ["q", "k", "v", "o", "wi", "wo"],
    "deepseek": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "glm": ["q_proj", "k_proj", "gate_up_proj", "down_proj"],
    "whisper": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "falcon": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}
DORA: dict[str, Any] = {
    # so rare a dropout that none happens: its results are computed from the inputs all the same
    "llama": {"target_modules": LLAMA[:-1], "use_dora": True, "lora_dropout": 1e-15},
    "gpt2": {"target_modules": TARGETS["gpt2"], "use_dora": True},
    "bert": {"target_modules": TARGETS["bert"], "use_dora": True},
}
PIPELINE = {"tp_size": 1, "pp_size": 2, "num_microbatches": 2}
SEQUENCES = {"pp_size": 1, "enable_sequence_parallelism": True}
WORLDS: dict[str, tuple[int, dict[str, Any], dict[str, list[str]]]] = {
    "tp2": (2, {"tp_size": 2, "pp_size": 1}, {name: TARGETS[name] for name in ("llama", "gpt2")}),
    "tp2, other families": (2, {"tp_size": 2, "pp_size": 1}, TARGETS),
    "tp2, more families": (2, {"tp_size": 2, "pp_size": 1}, ONLY_TP | {"llama": LLAMA}),
    "tp2, DoRA": (2, {"tp_size": 2, "pp_size": 1}, DORA),
    "tp4": (4, {"tp_size": 4, "pp_size": 1}, {"llama": LLAMA}),
    "pp2-v": (2, PIPELINE | {"pp_style": "zbv", "num_model_chunks": 2}, {"llama": LLAMA, "gpt2": TARGETS["gpt2"]}),
    "tp2-pp2": (4, PIPELINE | {"tp_size": 2}, {name: TARGETS[name] for name in ("llama", "gpt2", "bert")}),
    "tp2-dp2-zero1": (4, {"tp_size": 2, "pp_size": 1, "zero_stage": 1}, {"llama": LLAMA}),
    "tp2-sp2": (4, SEQUENCES | {"tp_size": 2, "sp_size": 2}, {"llama": LLAMA}),
}
IN_GATE = "tp2"


def config(targets: list[str] | dict[str, Any], name: str) -> peft.LoraConfig:
    given = {"r": 4, "lora_alpha": 8, "fan_in_fan_out": name == "gpt2"}
    return peft.LoraConfig(**given | (targets if isinstance(targets, dict) else {"target_modules": targets}))


def batch_of(name: str, step: int) -> dict[str, torch.Tensor]:
    pairs = [inputs_of(name, num_changed=each) for each in (step, step + 4)]
    return {key: torch.cat([pair[key] for pair in pairs]) for key in pairs[0]}


def loss_of(outputs: Any, _inputs: Any = None) -> torch.Tensor:
    return outputs.loss


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return build(name, num_layers=4 if name in TARGETS else None)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def alone(name: str, targets: list[str], num_parts: int) -> dict[str, Any]:
    model = peft.get_peft_model(model_of(name), config(targets, name)).double()
    optimizer = torch.optim.AdamW(trained(model).values(), **ADAM)
    norms = []
    for step in range(STEPS):
        for index in range(num_parts):
            part = {key: value.chunk(num_parts)[index] for key, value in batch_of(name, step).items()}
            with KeepFloat64():
                loss = model(**part).loss / num_parts
            loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained(model).values(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "end": {key: value.detach() for key, value in trained(model).items()}}


def train_one(name: str, targets: list[str], options: dict[str, Any], root: str) -> dict[str, Any]:
    plugin = HybridParallelPlugin(precision="fp32", max_norm=MAX_NORM, **options)
    booster = Booster(device="cpu", plugin=plugin)
    model: nn.Module = model_of(name)
    torch.manual_seed(torch.initial_seed() + dist.get_rank())  # ranks draw apart, but for adapters
    if dist.get_rank() == 0:
        model_of(name)
    model = booster.enable_lora(model, lora_config=config(targets, name)).double()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, loss_of)
    rank, size = plugin.data_parallel_rank_and_size()
    norms = []
    for step in range(STEPS):
        batch = {key: value.chunk(size)[rank] for key, value in batch_of(name, step).items()}
        if plugin.pp_size > 1:
            booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        else:
            booster.backward(criterion(model(**batch)), optimizer)
        norms.append(optimizer.get_grad_norm())
        optimizer.step()
        optimizer.zero_grad()
    booster.save_lora_as_pretrained(model, Path(root, name), use_safetensors=True)
    booster.save_lora_as_pretrained(model, Path(root, f"{name}-bin"))
    if name == "llama":
        booster.save_model(model, Path(root, "model.safetensors"), use_safetensors=True)
        booster.save_optimizer(optimizer, Path(root, "optimizer"))
    return {"norms": norms, "num_held": sum(each.numel() for each in optimizer.parameters)}


def train(world: str, root: str) -> dict[str, Any]:
    _, options, targets = WORLDS[world]
    with KeepFloat64():
        return {name: train_one(name, each, options, root) for name, each in targets.items()}


@pytest.mark.parametrize(
    "label", [pytest.param(each, marks=() if each == IN_GATE else pytest.mark.slow) for each in WORLDS]
)
def test_adapters_train_as_in_one_process(label: str, tmp_path: Path) -> None:
    size, options, targets = WORLDS[label]
    ranks = run_processes(train, size, label, str(tmp_path))
    parts = options["pp_size"] * (size // options["tp_size"] // options["pp_size"] // options.get("sp_size", 1))
    for name, each in targets.items():
        expected = alone(name, each, parts)
        for rank in ranks:
            assert rank[name]["norms"] == pytest.approx(expected["norms"], rel=RTOL), name
        for kind in (name, f"{name}-bin"):
            again = peft.PeftModel.from_pretrained(model_of(name), tmp_path / kind, is_trainable=True)
            found = trained(again)
            assert found.keys() == expected["end"].keys(), name
            for key, value in expected["end"].items():
                close(found[key].detach().double(), value, f"{label} {kind}: {key}")
        wholes = sum(value.numel() for value in expected["end"].values())
        assert all(rank[name]["num_held"] < wholes for rank in ranks), f"{name}: a rank updates all adapters"
    assert_goes_on_alone(tmp_path, targets["llama"])
    run_processes(load_again, size, label, str(tmp_path))
    (first, *_), (again, *_) = (sorted((tmp_path / each).glob("*.safetensors")) for each in ("llama", "again"))
    assert_equal(load_file(again), load_file(first))


def assert_goes_on_alone(root: Path, targets: list[str]) -> None:
    """The checkpoint of the whole run is that of one process."""
    booster = Booster(device="cpu")
    model: nn.Module = booster.enable_lora(model_of("llama"), lora_config=config(targets, "llama")).double()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3.0))
    assert optimizer is not None
    booster.load_model(model, root / "model.safetensors")
    booster.load_optimizer(optimizer, root / "optimizer")
    assert optimizer.param_groups[0]["lr"] == ADAM["lr"]
    assert all(int(state["step"]) == STEPS for state in optimizer.state.values())
    found = peft.get_peft_model_state_dict(model.unwrap(unwrap_peft=False), save_embedding_layers=False)
    assert_equal(found, load_file(root / "llama" / "adapter_model.safetensors"))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def load_again(world: str, root: str) -> None:
    """Go on from saved adapters, and save them again."""
    booster = Booster(device="cpu", plugin=HybridParallelPlugin(precision="fp32", **WORLDS[world][1]))
    model: nn.Module = booster.enable_lora(model_of("llama"), pretrained_dir=Path(root, "llama")).double()
    model, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.save_lora_as_pretrained(model, Path(root, "again"), use_safetensors=True)


def test_adapters_beside_layers_that_take_the_tokens_of_others_are_refused() -> None:
    with fake_world(2):
        plugin = HybridParallelPlugin(tp_size=2, precision="fp32", **SEQUENCES)
        booster = Booster(device="cpu", plugin=plugin)
        model = booster.enable_lora(build("llama"), lora_config=config(["q_proj"], "llama"))
        with pytest.raises(PlanError, match=r"'split_gather'.*adapters of .*layers\.0\.self_attn\.q_proj"):
            booster.boost(model, torch.optim.AdamW(model.parameters()))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "embeddings": ("llama", {"target_modules": ["embed_tokens"]}, "embed_tokens, a Embedding.*in modules_to_save"),
    "a variant": ("llama", {"target_modules": ["lm_head"], "use_dora": True}, "lm_head.*with a variant of LoRA"),
    "keys packed with queries": (
        "falcon-one-key",
        {"target_modules": ["query_key_value"]},
        "style 'colwise_multi_query'",
    ),
    "some tokens of an embedding": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": [0, 1]},
        "embed_tokens, a TrainableTokensWrapper.*Name the module in modules_to_save instead",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_can_not_be_divided_are_refused(case: str) -> None:
    name, options, message = REFUSED[case]
    with fake_world(2):
        booster = Booster(device="cpu", plugin=HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"))
        model = booster.enable_lora(build(name), lora_config=peft.LoraConfig(r=2, **options))
        with pytest.raises(PlanError, match=message):
            booster.boost(model, torch.optim.AdamW(model.parameters()))


def test_quantised_weights_stay_whole() -> None:
    with fake_world(2):
        booster = Booster(device="cpu", plugin=HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"))
        with pytest.raises(UnsupportedError, match="Quantized weights have to stay unsharded"):
            booster.enable_lora(build("llama"), lora_config=config(LLAMA, "llama"), quantize=True)


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare what peft has loaded, in float32."""
    limit = torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=limit, msg=lambda text: f"{what}: {text}")
