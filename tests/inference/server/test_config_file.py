"""The documented configuration file, and checkpoints of OPT in each documented form."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from colossal._src.inference.server import ServerSettings, load_engine, read_config_file
from colossal._src.inference.server.opt import OPT_SIZES, load_opt
from colossal.errors import CheckpointError, ConfigError

SIZES: dict[str, Any] = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"vocab_size": 64, "word_embed_proj_dim": 16, "max_position_embeddings": 64}


def make_config(**changes: Any) -> Any:
    return OPTConfig(**SIZES | changes)


def write(folder: Path, text: str) -> Path:
    path = folder / "opt_config.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return OPTForCausalLM(make_config()).eval()


def metaseq_state(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model by their names in metaseq, whose layers have one projection for keys, values, queries."""
    state: dict[str, torch.Tensor] = {"decoder.version": torch.tensor([3.0])}
    for name, value in model.model.state_dict().items():
        new = name.replace("decoder.final_layer_norm", "decoder.layer_norm")
        if "self_attn.k_proj" in new:
            others = [model.model.state_dict()[name.replace("k_proj", part)] for part in ("v_proj", "q_proj")]
            state[new.replace("k_proj", "qkv_proj")] = torch.cat([value, *others])
        elif not any(part in new for part in ("v_proj", "q_proj")):
            state[new] = value
    return state


def test_all_documented_keys_are_read(tmp_path, model) -> None:
    model.save_pretrained(tmp_path / "model")
    text = f"""
import math
model_class = opt_125M
model_type = "opt"
host = "127.0.0.1"
port = 29402
half = True
checkpoint = {str(tmp_path / "model")!r}
backend = "nccl"
tp_init_size = 1
pp_init_size = 1
engine_server = launch_engine
tokenizer_path = "tokens"
server_host = "0.0.0.0"
server_port = 8021
log_level = "warning"
allow_cors = False
executor_max_batch_size = 4
cache_size = 50
cache_list_size = 2
_half_of_it = math.ceil(cache_size / 2)
"""
    assert read_config_file(write(tmp_path, text)) == ServerSettings(
        model=tmp_path / "model",
        tokenizer=Path("tokens"),
        model_name="opt_125M",
        host="0.0.0.0",  # noqa: S104 (documented)
        port=8021,
        log_level="warning",
        dtype=torch.float16,
        max_batch_size=4,
        cache_size=50,
        cache_list_size=2,
    )


def test_the_variable_of_the_image_stands_for_the_checkpoint(tmp_path, model, monkeypatch) -> None:
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path))
    settings = read_config_file(write(tmp_path, "checkpoint = '$CHECKPOINT_DIR/model'"))
    assert (settings.model, settings.model_name, settings.port) == (tmp_path / "model", "model", 8020)
    assert load_engine(settings).config.max_batch_size == 16


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model_klass = 'opt_125M'", "Found model_klass"),
        ("server_port = '8020'", "server_port .* Found '8020'"),
        ("executor_max_batch_size = 0", "executor_max_batch_size .* Found 0"),
        ("log_level = 'loud'", "log_level .* Found 'loud'"),
        ("model_type = 'gpt'", "model_type .* Found 'gpt'"),
        ("engine_server = print", "engine_server"),
        ("model_class = 'opt_1M'", "Found 'opt_1M'"),
        ("cache_size = 2", "Found None"),
    ],
)
def test_a_key_that_is_wrong_is_named(tmp_path, line, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config_file(write(tmp_path, line))


def test_several_ranks_are_refused_with_the_reason(tmp_path, model) -> None:
    model.save_pretrained(tmp_path / "model")
    settings = read_config_file(write(tmp_path, f"tp_init_size = 2\ncheckpoint = {str(tmp_path / 'model')!r}"))
    with pytest.raises(ConfigError, match="tp_size=2"):
        load_engine(settings)


# ------------------------------------------------------------------------------------------ checkpoints


def test_a_checkpoint_of_metaseq_gives_the_same_logits(tmp_path, model) -> None:
    torch.save({"model": metaseq_state(model), "args": None}, tmp_path / "restored.pt")
    loaded = load_opt(make_config, tmp_path / "restored.pt", half=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert load_opt(make_config, tmp_path / "restored.pt", half=True).dtype is torch.float16


def test_a_checkpoint_may_be_a_folder_of_fragments(tmp_path, model) -> None:
    items = list(metaseq_state(model).items())
    for number in range(3):
        torch.save(dict(items[number::3]), tmp_path / f"part-{number}.pt")
    loaded = load_opt(make_config, tmp_path, half=False)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_pickle_that_would_run_something_is_not_loaded(tmp_path) -> None:
    marker = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return marker.touch, ()

    torch.save({"model": {}, "args": Trap()}, tmp_path / "restored.pt")
    with pytest.raises(CheckpointError, match="weights_only=True"):
        load_opt(make_config, tmp_path / "restored.pt", half=False)
    assert not marker.exists()


def test_a_checkpoint_of_another_size_and_none_at_all_are_refused(tmp_path, model) -> None:
    torch.save({"model": metaseq_state(model)}, tmp_path / "restored.pt")
    with pytest.raises(CheckpointError, match="has another shape"):
        load_opt(lambda: make_config(ffn_dim=48), tmp_path / "restored.pt", half=False)
    with pytest.raises(CheckpointError, match="Found .*nowhere"):
        load_opt(make_config, tmp_path / "nowhere", half=False)


def test_documented_classes_have_the_published_sizes() -> None:
    millions = {"opt_125M": 125, "opt_6B": 6_658, "opt_30B": 29_975, "opt_66B": 65_718, "opt_175B": 175_000}
    for name, (layers, hidden, heads) in OPT_SIZES.items():
        count = (50_272 + 2_050) * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
        assert count == pytest.approx(millions[name] * 1e6, rel=0.01)
        assert hidden % heads == 0
