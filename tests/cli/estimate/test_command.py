"""`colossal estimate` as a user runs it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaModel, ViTConfig

from colossal._src.cli.estimate.command import command

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def estimate(directory: Path, *words: str) -> Result:
    return CliRunner().invoke(command, [str(directory), "--ranks", "4", *words])


def as_json(directory: Path, *words: str) -> Any:
    done = estimate(directory, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = LlamaConfig(**SIZES, vocab_size=256, max_position_embeddings=64, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    return tmp_path


def test_a_table_of_what_a_rank_holds(llama: Path) -> None:
    done = estimate(llama, "--plugin", "hybrid", "--tp", "2", "--pp", "2")
    assert done.exit_code == 0, done.output
    title, batch, heads, *rows = done.stdout.splitlines()
    assert title == "plugin hybrid, 4 ranks, fp32, MB per rank"  # of a small model
    assert batch == "1 micro-batch of 1 sample (set by --batch-size and --num-microbatches)"
    held = as_json(llama, "--plugin", "hybrid", "--tp", "2", "--pp", "2")["ranks"]
    assert rows[0].split()[1:] == [f"{rank['parameter_bytes'] / 1e6:.3f}" for rank in held]
    assert heads.split() == ["rank", "0", "rank", "2"]
    assert [row[:22].strip() for row in rows] == [
        "parameters", "gradients", "optimizer states", "buffers", "activations", "temporary", "on the device",
        "sent in a step, pp", "sent in a step, tp",
    ]  # fmt: skip


@pytest.mark.slow
def test_with_memory_it_says_what_fits(llama: Path) -> None:
    most = as_json(llama)["ranks"][0]["device_bytes"] / 1e9
    fits = estimate(llama, "--memory", str(2 * most))
    assert fits.exit_code == 0
    assert "It fits" in fits.stdout
    full = estimate(llama, "--memory", str(0.7 * most), "--json")
    assert full.exit_code == 1
    hint = json.loads(full.stdout)["hint"]
    words = hint.partition("It fits with ")[2].partition(":")[0].split()
    assert words
    assert estimate(llama, *words, "--memory", str(0.7 * most)).exit_code == 0
    never = estimate(llama, "--memory", "1e-9")
    assert never.exit_code == 1
    assert "No other option fits on 4 ranks. The least is" in never.stdout
    assert never.stdout.rstrip().endswith("or --plugin hybrid --tp 2.")
    sharded = estimate(llama, "--plugin", "hybrid", "--tp", "2", "--memory", "1e-9")
    assert sharded.stdout.rstrip().endswith("Pass more --ranks, or --tp 4.")


def test_weights_alone_tell_what_they_need(llama: Path, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, vocab_size=256, max_position_embeddings=64)
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(LlamaModel(config).state_dict(), folder / "model.safetensors")
    LlamaConfig(**SIZES, vocab_size=256, max_position_embeddings=64, architectures=["LlamaModel"]).save_pretrained(
        llama
    )
    for plugin in ("zero1", "fsdp", "gemini"):
        (one,) = as_json(folder, "--plugin", plugin)["ranks"]
        (other,) = as_json(llama, "--plugin", plugin)["ranks"]
        for name in ("num_parameters", "optimizer_bytes", "gradient_bytes"):
            assert one[name] == other[name]
        assert one["activation_bytes"] is None
    assert "unknown" in estimate(folder).stdout
    split = estimate(folder, "--plugin", "hybrid", "--tp", "2")
    assert split.exit_code == 1
    assert "Layers are split that are known. Found --tp 2 --pp 1" in split.output
    recomputed = estimate(folder, "--checkpoint-layers")
    assert recomputed.exit_code == 1
    assert "Found --checkpoint-layers, and a directory with weights alone." in recomputed.output


@pytest.mark.slow
def test_options_change_what_they_say(llama: Path) -> None:
    def one(*words: str) -> Any:
        return as_json(llama, *words)["ranks"][0]

    plain, recomputed = one("-b", "16"), one("-b", "16", "--checkpoint-layers")
    assert recomputed["activation_bytes"] < plain["activation_bytes"]
    split = one("--plugin", "hybrid", "--sp", "2", "-b", "8")
    full = one("--plugin", "hybrid", "-b", "16")
    assert split["activation_bytes"] == pytest.approx(full["activation_bytes"] / 2, rel=0.1)
    stages = ("--plugin", "hybrid", "--pp", "2", "-b", "8")  # two micro-batches in flight, of one sample, or of two
    larger = one(*stages, "--num-microbatches", "2")["activation_bytes"]
    assert larger == pytest.approx(2 * one(*stages)["activation_bytes"], rel=0.1)
    half = one("--precision", "bf16", "-b", "16")
    assert half["parameter_bytes"] == plain["parameter_bytes"]  # autocast
    assert half["activation_bytes"] < plain["activation_bytes"]
    for plugin in ("zero1", "zero2", "fsdp", "gemini"):
        kept, offloaded = one("--plugin", plugin), one("--plugin", plugin, "--offload")
        assert offloaded["device_bytes"] == kept["device_bytes"] - offloaded["host_bytes"]
        assert offloaded["host_bytes"] >= offloaded["optimizer_bytes"]
    assert set(one("--plugin", "gemini", "--tp", "2")["sent_bytes"]) == {"dp", "tp"}


def test_a_model_of_images(tmp_path: Path) -> None:
    ViTConfig(**SIZES, image_size=32, patch_size=8, architectures=["ViTForImageClassification"]).save_pretrained(
        tmp_path
    )
    (one,) = as_json(tmp_path)["ranks"]
    assert one["activation_bytes"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tp", "2"], "The plugin ddp splits nothing but the batch. Found --tp 2."),
        (["--plugin", "gemini", "--pp", "2"], "The plugin gemini splits tp. Found --pp 2."),
        (["--plugin", "hybrid", "--tp", "3"], "divide the ranks. Found 3 x 1 x 1 for 4 ranks."),
        (["-b", "6"], "Found --batch-size 6 for 4 of them. Pass a multiple of 4."),
        (["--offload"], "The plugin ddp keeps everything on the device. Found --offload."),
        (["--num-microbatches", "2"], "Found --num-microbatches 2 for 1 and --pp 1."),
        (["--plugin", "hybrid", "--pp", "2", "-b", "8", "--num-microbatches", "3"], "a number that divides 4"),
        (["--zero-stage", "1"], "--zero-stage belongs to the plugin hybrid. Found it with ddp."),
    ],
)
def test_contradictions_are_refused(words: list[str], message: str, llama: Path) -> None:
    done = estimate(llama, *words)
    assert done.exit_code == 1
    assert message in done.output


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    done = estimate(tmp_path)
    assert "A model is described by config.json, or by safetensors files. Found neither in" in done.output
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert "but not model-00001-of-00002.safetensors" in estimate(tmp_path).output
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    assert "describes a model that transformers knows. Found" in estimate(tmp_path).output
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    done = estimate(tmp_path)
    assert done.exit_code == 1
    assert "Found architectures: NoSuchModel" in done.output


def test_torch_is_left_as_it_was(llama: Path) -> None:
    estimate(llama)
    assert not torch.distributed.is_initialized()
