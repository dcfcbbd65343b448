# pyright: reportAttributeAccessIssue=false, reportSelfClsParameterName=false
"""Models of transformers with the weights of a checkpoint, each lazily and at once."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from colossal._src.interface.pretrained import get_pretrained_path, set_pretrained_path
from colossal._src.lazy.pretrained import stored_tensors
from colossal._src.lazy.stored_tensor import StoredTensor
from colossal._src.lazy.tensor import view_of
from colossal.errors import CheckpointError, ConfigError, UnsupportedError
from colossal.interface import ModelWrapper
from colossal.lazy import LazyInitContext, LazyTensor, lazy_tensors, materialize

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
OPT = {k: v for k, v in SMALL.items() if k != "intermediate_size"} | {"ffn_dim": 64, "word_embed_proj_dim": 32}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "tied llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "bert": ("BertForMaskedLM", "BertConfig", SMALL),
    "bare bert": ("BertModel", "BertConfig", SMALL),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
}
CASES = {  # what is saved, and what it is loaded into
    "sharded llama": ("llama", "AutoModelForCausalLM"),
    "tied llama": ("tied llama", "AutoModelForCausalLM"),
    "a llama without its head": ("llama", "AutoModel"),
    "a llama with another head": ("llama", "AutoModelForSequenceClassification"),
    "gpt2, tied": ("gpt2", "AutoModelForCausalLM"),
    "gpt2 without its head": ("gpt2", "GPT2Model"),
    "opt": ("opt", "AutoModelForCausalLM"),
    "bert": ("bert", "BertForMaskedLM"),
    "bert with heads for pretraining": ("bert", "BertForPreTraining"),
    "bert with another head": ("bert", "BertForSequenceClassification"),
    "a bare bert into one with a head": ("bare bert", "BertForTokenClassification"),
    "t5": ("t5", "AutoModelForSeq2SeqLM"),
    "mixtral, whose experts are merged": ("mixtral", "AutoModelForCausalLM"),
    "qwen2, with biases": ("qwen2", "AutoModelForCausalLM"),
}
DTYPES: dict[str, dict[str, Any]] = {
    "as in the config": {},
    "auto": {"dtype": "auto"},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16, by its old name": {"torch_dtype": "float16"},
    "float64": {"dtype": torch.float64},
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Callable[..., Path]:
    """Save a model, in several files, once for all tests that only read it."""
    folders: dict[tuple[str, torch.dtype], Path] = {}

    def save(family: str, dtype: torch.dtype = torch.float32) -> Path:
        if (family, dtype) not in folders:
            model, config, options = SAVED[family]
            torch.manual_seed(11)
            folder = tmp_path_factory.mktemp("checkpoint")
            built = getattr(transformers, model)(getattr(transformers, config)(**options)).to(dtype)
            for parameter in built.parameters():
                nn.init.normal_(parameter, std=0.1)
            built.save_pretrained(folder, max_shard_size="20KB")
            if dtype != torch.float32:
                config_file = folder / "config.json"
                config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"dtype": str(dtype)[6:]}))
            folders[family, dtype] = folder
        return folders[family, dtype]

    return save


def load_lazily(folder: Path, kind: str = "AutoModelForCausalLM", **options: Any) -> Any:
    with LazyInitContext():
        return getattr(transformers, kind).from_pretrained(folder, **options)


class Reads:
    """Which tensors are read from files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        real = safetensors.safe_open

        class Spy:
            def __init__(spy, *args: Any, **kwargs: Any) -> None:  # noqa: N805
                spy.file = real(*args, **kwargs)

            def __enter__(spy) -> Any:  # noqa: N805
                spy.file.__enter__()
                return spy

            def __exit__(spy, *error: object) -> None:  # noqa: N805
                spy.file.__exit__(*error)

            def keys(spy) -> Any:  # noqa: N805
                return spy.file.keys()

            def get_tensor(spy, name: str) -> torch.Tensor:  # noqa: N805
                self.names.append(name)
                return spy.file.get_tensor(name)

        monkeypatch.setattr(safetensors, "safe_open", Spy)


# ------------------------------------------------------------------------------------------ the same model


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_is_loaded_as_at_once(case: str, stored, saved, same_modules: Callable[..., Any]) -> None:
    family, kind = CASES[case]
    folder = saved(family, stored)
    assert len(list(folder.glob("*.safetensors"))) > 1
    eager, lazy = same_modules(lambda: getattr(transformers, kind).from_pretrained(folder))
    assert lazy.config.to_dict() == eager.config.to_dict()
    assert lazy.name_or_path == eager.name_or_path == str(folder)
    assert not lazy.training
    assert all(not module.training for module in lazy.modules())
    if eager.can_generate():
        assert lazy.generation_config.to_dict() == eager.generation_config.to_dict()
    model = load_lazily(folder, kind)
    assert all(isinstance(each, LazyTensor) for each in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["sharded llama", "t5", "mixtral, whose experts are merged", "gpt2, tied"])
def test_in_the_dtype_that_is_asked_for(case: str, dtype, saved, same_modules: Callable[..., Any]) -> None:
    family, kind = CASES[case]
    folder = saved(family, torch.float16)
    _, lazy = same_modules(lambda: getattr(transformers, kind).from_pretrained(folder, **DTYPES[dtype]))
    kept = {"float16, by its old name": {torch.float32}, "auto": {torch.float32}, "as in the config": {torch.float32}}
    found = {parameter.dtype for parameter in lazy.parameters()} - (kept.get(dtype, set()) if family == "t5" else set())
    asked = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(dtype, torch.float16)
    assert found == {asked}


def test_a_dtype_that_only_the_weights_tell(saved, tmp_path, same_modules: Callable[..., Any]) -> None:
    for file in saved("qwen2", torch.bfloat16).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, lazy = same_modules(lambda: transformers.AutoModel.from_pretrained(tmp_path))
    assert lazy.dtype == torch.bfloat16


def test_options_reach_the_model(saved, same_modules: Callable[..., Any]) -> None:
    folder = saved("llama")  # which must not be built lazily

    def build() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, vocab_size=50, ignore_mismatched_sizes=True, attn_implementation="eager", device_map="cpu"
        )

    _, lazy = same_modules(build)
    assert lazy.config._attn_implementation == "eager"
    assert lazy.lm_head.weight.shape == (50, 32)


def test_names_that_a_mapping_changes(saved, tmp_path, same_modules: Callable[..., Any]) -> None:
    from safetensors.torch import load_file, save_file

    state = {}
    for file in saved("llama").glob("*.safetensors"):
        state |= load_file(file)
    save_file({f"old.{name}": tensor for name, tensor in state.items()}, tmp_path / "model.safetensors")
    transformers.AutoConfig.from_pretrained(saved("llama")).save_pretrained(tmp_path)
    _, lazy = same_modules(
        lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, key_mapping={r"^old\.": ""})
    )
    for name, parameter in lazy.named_parameters():
        assert torch.equal(parameter, state[name])


def test_what_is_missing_is_reported_as_at_once(saved, monkeypatch) -> None:
    from transformers import modeling_utils

    reports: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning", reports.append)
    folder = saved("bert")
    kind = transformers.BertForSequenceClassification
    _, eager = kind.from_pretrained(folder, output_loading_info=True)
    with LazyInitContext():
        _, lazy = kind.from_pretrained(folder, output_loading_info=True)
    assert eager == lazy
    assert lazy["missing_keys"] >= {"classifier.weight", "classifier.bias"}
    assert lazy["unexpected_keys"]
    assert len(reports) == 2
    assert reports[0] == reports[1]
    assert "classifier.weight" in reports[1]


@pytest.mark.parametrize("same", [True, False])
def test_a_checkpoint_with_both_of_two_tied_weights(same: bool, saved, tmp_path, same_modules) -> None:
    from safetensors.torch import load_file, save_file

    state = {}
    for file in saved("tied llama").glob("*.safetensors"):
        state |= load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + (not same)
    save_file(state, tmp_path / "model.safetensors")
    transformers.AutoConfig.from_pretrained(saved("tied llama")).save_pretrained(tmp_path)
    _, lazy = same_modules(lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert (lazy.lm_head.weight is lazy.model.embed_tokens.weight) == same
    model = load_lazily(tmp_path)
    assert not any(view_of(each).recipe.has_kept for each in lazy_tensors(model)), "what is compared is not kept"


def test_adapters_beside_their_model(saved, tmp_path, same_modules: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    _, lazy = same_modules(lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert sum("lora" in name for name, _ in lazy.named_parameters()) == 4


def test_weights_that_have_values_keep_them(saved) -> None:
    given = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"))
    with LazyInitContext():
        model = type(given).from_pretrained(None, config=given.config, state_dict=given.state_dict())
    for name, parameter in materialize(model).named_parameters():
        assert torch.equal(parameter, given.get_parameter(name))


# ------------------------------------------------------------------------------------------ one after the other


def test_only_what_is_materialized_is_read(saved, monkeypatch) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"))
    model = load_lazily(saved("llama"))
    reads = Reads(monkeypatch)
    materialize(model.model.layers[1])
    assert sorted(reads.names) == sorted(
        f"model.layers.1.{name}" for name, _ in expected.model.layers[1].named_parameters()
    )
    reads.names.clear()
    norm = model.model.norm.weight
    assert norm.materialize() is norm
    assert reads.names == ["model.norm.weight"]
    assert isinstance(model.lm_head.weight, LazyTensor)
    materialize(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name))


def test_values_do_not_lie_in_the_file(saved, tmp_path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(saved("llama")).save_pretrained(tmp_path)
    model = materialize(load_lazily(tmp_path))
    expected = parameters_to_vector(model.parameters()).clone()
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as content:
        content.write(bytes(file.stat().st_size))
    assert torch.equal(parameters_to_vector(model.parameters()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_part_of_a_tensor(dtype: torch.dtype, saved) -> None:
    for family in ("llama", "mixtral", "gpt2"):
        expected = transformers.AutoModelForCausalLM.from_pretrained(saved(family), dtype=dtype)
        model = load_lazily(saved(family), dtype=dtype)
        for name, parameter in model.named_parameters():
            whole, numel = expected.get_parameter(name).detach().reshape(-1), parameter.numel()
            for begin, end in ((0, numel), (numel // 3, numel // 2), (numel - 1, numel), (5, 5)):
                part = parameter.flat_values(begin, end)
                assert torch.equal(part, whole[begin:end]), name
                assert part.dtype == dtype
                assert part.untyped_storage().nbytes() == part.nbytes
                assert not part.requires_grad
        assert all(isinstance(each, LazyTensor) for each in model.parameters())
        assert not any(view_of(each).recipe.has_kept for each in lazy_tensors(model))


def test_a_part_of_what_comes_about_otherwise() -> None:
    torch.manual_seed(0)
    with LazyInitContext():
        drawn = torch.randn(40)
        turned = torch.arange(6.0).view(2, 3).t()
        window = torch.arange(10.0)[4:].view(2, 3)
        changed = drawn.clone().add_(1)
        complexes = torch.complex(torch.ones(3), torch.arange(3.0)).conj()
        before = drawn.double()
        drawn.mul_(2)
    made = (drawn, turned, window, changed, complexes, before)
    parts = [each.flat_values(2, each.numel()) for each in made]
    for each, part in zip(made, parts, strict=True):
        assert torch.equal(part, each.values().reshape(-1)[2:])
    drawn.values().fill_(7)
    assert drawn.flat_values(0, 2).tolist() == [7, 7]
    assert torch.equal(before.flat_values(0, 2), parts[-1].new_tensor(before.values()[:2].tolist()))


def windows(table: torch.Tensor) -> list[torch.Tensor]:
    half, images = table.bfloat16(), table.view(2, 3, 2, 2)
    return [
        table,
        table[2:],
        table[1:3, :2],
        table.t(),
        table.chunk(3)[1],
        table[:, ::2].clone(),
        table.t().contiguous(),
        table.view(torch.int32),
        torch.view_as_real(table.cfloat()),
        table.cfloat().conj().to(torch.complex128),
        half[2:],
        table[2:].bfloat16(),
        table.t().bfloat16(),
        table.t().bfloat16().t(),
        table.double().bfloat16().view(-1)[3:],
        images.clone(memory_format=torch.channels_last).permute(0, 2, 3, 1),
        images[:1, :1].to(torch.float64, memory_format=torch.channels_last),
        table.new_ones(6, 4) + table,
        table.expand(2, 6, 4)[1],
    ]


def test_a_part_of_a_window_on_a_file(tmp_path) -> None:
    safetensors.torch.save_file({"table": torch.arange(24.0).view(6, 4)}, tmp_path / "model.safetensors")
    with LazyInitContext():
        lazy = windows(stored_tensors(tmp_path / "model.safetensors")["table"])
    for number, (expected, window) in enumerate(zip(windows(torch.arange(24.0).view(6, 4)), lazy, strict=True)):
        numel = expected.numel()
        for begin, end in ((0, numel), (1, numel), (numel // 2, numel - 1)):
            part = window.flat_values(begin, end)
            assert part.dtype == expected.dtype
            assert torch.equal(part, expected.reshape(-1)[begin:end]), number


def test_a_part_is_all_that_is_read_and_converted(saved, monkeypatch) -> None:
    def whole(stored: StoredTensor) -> torch.Tensor:
        raise AssertionError(stored.name)

    monkeypatch.setattr(StoredTensor, "__call__", whole)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_lazily(saved("llama"), dtype=dtype)
        assert {len(each.flat_values(1, 3)) for each in model.parameters()} == {2}


def test_values_that_somebody_has_stay_theirs() -> None:
    with LazyInitContext():
        tensor = torch.ones(2)
        given = tensor.values()
        tensor.add_(1)
    assert tensor.flat_values(0, 1).tolist() == [2]
    assert tensor.values().data_ptr() == given.data_ptr()


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (2, 1), (0, 7)])
def test_a_part_that_is_none(begin: int, end: int) -> None:
    with LazyInitContext():
        tensor = torch.zeros(2, 3)
    with pytest.raises(ConfigError, match=f"Found {begin} to {end} of LazyTensor.*0 <= begin <= end <= 6"):
        tensor.flat_values(begin, end)


PROGRAM = """
import sys
import torch
from pathlib import Path
from colossal.lazy import LazyInitContext, materialize

def megabytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024

def grown(action):
    Path("/proc/self/clear_refs").write_text("5")
    before = megabytes("VmRSS")
    made = action()
    print(megabytes("VmHWM") - before)
    return made

def load():
    with LazyInitContext():
        from transformers import AutoModelForCausalLM
        return AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)

materialize(load())
model = grown(load)
shards = grown(lambda: [each.flat_values(0, each.numel() // 4) for each in model.parameters()])
grown(lambda: materialize(model))
"""


def test_memory(tmp_path) -> None:
    config = transformers.LlamaConfig(**GROUPED | {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": 16384})
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    size = sum(each.nbytes for each in model.parameters()) >> 20
    largest = max(each.nbytes for each in model.parameters()) >> 20
    model.save_pretrained(tmp_path, max_shard_size="50MB")
    run = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    built, shards, whole = map(int, run.stdout.split())
    assert size > 150
    assert built < 10
    assert size // 4 - 10 < shards < size // 4 + largest
    assert size - 10 < whole < size + 2 * largest


# ------------------------------------------------------------------------------------------ what is refused


def as_bin(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))


def damaged(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)


def with_another_shape(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = next(file for file in folder.glob("*.safetensors") if "model.norm.weight" in load_file(file))
    save_file(load_file(file) | {"model.norm.weight": torch.ones(31)}, file, {"format": "pt"})


def with_an_odd_expert(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    save_file(load_file(file) | {name: torch.ones(3, 3)}, file, {"format": "pt"})


REFUSED: dict[str, tuple[str, Callable[[Path], None] | None, dict[str, Any], type[Exception], str]] = {
    "a pickle": ("llama", as_bin, {}, UnsupportedError, r"pytorch_model.bin for .*outside of LazyInitContext"),
    "quantised": ("llama", quantised, {}, UnsupportedError, r"FP8.* quantizes for .*outside of LazyInitContext"),
    "no maps": ("llama", None, {"disable_mmap": True}, UnsupportedError, "disable_mmap=True for .*Leave it out"),
    "devices": (
        "llama",
        None,
        {"device_map": {"": "cpu", "lm_head": "meta"}},
        UnsupportedError,
        "device_map=.*lm_head.*Leave it out",
    ),
    "a damaged file": ("llama", damaged, {}, CheckpointError, r"Found .*safetensors, which cannot be read"),
    "another shape": (
        "llama",
        with_another_shape,
        {},
        CheckpointError,
        r"Found model.norm.weight of shape \(31,\) in .*, where the model has \(32,\).*ignore_mismatched_sizes",
    ),
    "a conversion that fails": (
        "mixtral",
        with_an_odd_expert,
        {},
        UnsupportedError,
        r"Found model.layers.0.mlp.experts.gate_up_proj, whose conversion failed: .*outside of LazyInitContext",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, saved, tmp_path) -> None:
    family, spoil, options, kind, message = REFUSED[name]
    transformers.AutoModelForCausalLM.from_pretrained(saved(family)).save_pretrained(tmp_path)
    if spoil is not None:
        spoil(tmp_path)
    with pytest.raises(kind, match=message):
        load_lazily(tmp_path, **options)
    assert not hasattr(transformers.PreTrainedModel._load_pretrained_model, "enter"), "the detour is left"


def test_files_must_stay_until_they_are_read(tmp_path, saved) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved("llama"))
    model.save_pretrained(tmp_path)
    first, second = load_lazily(tmp_path), load_lazily(tmp_path)
    model.save_pretrained(tmp_path)
    os.utime(tmp_path / "model.safetensors", (1, 1))  # clocks of files may be coarse
    message = "Found the tensor 'lm_head.weight' of .*model.safetensors, which was written to since"
    with pytest.raises(CheckpointError, match=message):
        first.lm_head.weight.materialize()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="'model.norm.weight' of .*No such file.*Leave the file where it is"):
        second.model.norm.weight.flat_values(0, 3)


# ------------------------------------------------------------------------------------------ the detour


def test_outside_everything_is_as_it_was(saved) -> None:
    folder = saved("opt")  # which must not be built lazily
    original = transformers.PreTrainedModel._load_pretrained_model
    with LazyInitContext():
        with LazyInitContext():
            load = transformers.AutoModel.from_pretrained
            inner = load(folder)
        assert transformers.PreTrainedModel._load_pretrained_model is not original
        outer = load(folder)
        found: list[nn.Module] = []
        thread = threading.Thread(target=lambda: found.append(load(folder)))
        thread.start()
        thread.join()
    assert transformers.PreTrainedModel._load_pretrained_model is original
    assert all(isinstance(each, LazyTensor) for model in (inner, outer) for each in model.parameters())
    assert not list(lazy_tensors(found[0])), "a thread outside of the context loads at once"
    assert not list(lazy_tensors(load(folder)))


# ------------------------------------------------------------------------------------------ the path


def test_the_path_is_remembered(saved) -> None:
    model = load_lazily(saved("opt"))
    file = str(saved("opt") / "model.safetensors.index.json")
    assert get_pretrained_path(model) == file
    assert get_pretrained_path(ModelWrapper(materialize(model))) == file
    assert get_pretrained_path(transformers.AutoModel.from_pretrained(saved("opt"))) is None
    set_pretrained_path(ModelWrapper(model), Path("elsewhere"))
    assert get_pretrained_path(model) == "elsewhere"
    assert "elsewhere" not in model.state_dict()
