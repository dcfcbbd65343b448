"""The program that pretrains: every family equal to one process under plugins, resumed under another, and exported."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from colossal.testing import run_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMON = ["--smoke", "--precision", "fp32", "--steps", "10", "--eval-every", "0", "--save-every", "0"]
CASES = {
    "gpt2-tp": ["--plugin", "hybrid", "--tp", "2"],
    "gpt2-sp": ["--plugin", "hybrid", "--sp", "2", "--profile"],
    "bert-zero": ["--plugin", "zero1", "--accumulate", "2"],
    "vit-pp": ["--plugin", "hybrid", "--pp", "2"],
    "llama-gemini": ["--plugin", "gemini", "--checkpoint-layers"],
    "llama-fsdp": ["--plugin", "fsdp"],
    "llama-zbv": ["--plugin", "hybrid", "--pp", "2", "--pp-style", "zbv", "--num-microbatches", "8"],
    "opt-ddp": ["--plugin", "ddp"],
    "mixtral-ep": ["--plugin", "hybrid", "--ep", "2"],
    "mixtral-zero": ["--plugin", "zero2"],  # its loss has a product of means over the samples of all ranks
}
FAMILIES = ("gpt2", "bert", "vit", "llama", "opt", "mixtral")
COMPARED = {"mixtral": 1}
"""How many steps: after one, rounding decides where a token goes whose experts have equal scores."""


def part_of_the_program(name: str) -> Any:
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT))]
    return importlib.import_module(f"examples.pretrain.{name}")


def pretrain(runs: list[list[str]]) -> None:
    """Run the program in processes that are launched, once after the other."""
    train = part_of_the_program("train")
    for words in runs:
        train.run(train.parse([*COMMON, *words]))


def kill_in_step_6(words: list[str]) -> None:
    """What a rank does that is gone between two checkpoints."""
    train, calls = part_of_the_program("train"), list[Any]()
    training = train.make_training(train.parse([*COMMON, *words]))
    take_step = training.step

    def step(batch: Any) -> dict[str, float]:
        calls.append(batch)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return take_step(batch)

    training.step = step
    with pytest.raises(KeyboardInterrupt):
        training.train()


def words_of(family: str) -> list[str]:
    return ["--family", family, "--output"]


def losses_of(folder: Path) -> torch.Tensor:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    return torch.tensor([line["loss"] for line in lines])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """What one process does with each family, and the words that name its data; that of BERT has three batches."""
    folder = tmp_path_factory.mktemp("pretrain")
    run_processes(pretrain, 1, [[*words_of("gpt2"), str(folder / "gpt2")]])
    tokens, few = folder / "gpt2" / "smoke" / "tokens", folder / "few"
    shutil.copytree(tokens, few)
    (few / "tokens.bin").write_bytes((tokens / "tokens.bin").read_bytes()[: 2 * 32 * (3 * 16 + 1)])
    data = {family: ["--data", str(few if family == "bert" else tokens)] for family in FAMILIES}
    data["vit"] = []
    runs = [[*data[family], *words_of(family), str(folder / family)] for family in FAMILIES if family != "gpt2"]
    run_processes(pretrain, 1, runs)
    return folder, data


def test_every_family_learns_as_in_one_process_under_every_plugin(source, tmp_path) -> None:
    folder, data = source
    families = {name: name.partition("-")[0] for name in CASES}
    runs = [[*CASES[name], *data[family], *words_of(family), str(tmp_path / name)] for name, family in families.items()]
    run_processes(pretrain, 2, runs)
    for family in FAMILIES:
        losses = losses_of(folder / family)
        assert losses[-3:].mean() < 0.92 * losses[:3].mean(), (family, losses)
    for name, family in families.items():
        found, expected = (losses_of(each)[: COMPARED.get(family)] for each in (tmp_path / name, folder / family))
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)
    traces = sorted((tmp_path / "gpt2-sp" / "profile").iterdir())
    assert [trace.name for trace in traces] == ["rank-0.json", "rank-1.json"]
    assert len({event["name"] for event in json.loads(traces[1].read_text())["traceEvents"]}) > 50


def test_a_killed_run_goes_on_under_another_plugin(source, tmp_path) -> None:
    folder, data = source
    words = [*data["bert"], "--save-every", "2", "--resume", *words_of("bert"), str(tmp_path / "run")]
    run_processes(kill_in_step_6, 1, words)
    assert not (tmp_path / "run" / "model").exists()
    # 4 steps are saved, in the middle of the second epoch, and the fifth was logged only
    run_processes(pretrain, 2, [[*words, "--plugin", "hybrid", "--pp", "2"]])
    torch.testing.assert_close(losses_of(tmp_path / "run"), losses_of(folder / "bert"), atol=5e-5, rtol=0)
    assert (tmp_path / "run" / "model" / "model.safetensors.index.json").exists()


def test_the_saved_model_continues_text(source) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(source[0] / "gpt2" / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(source[0] / "gpt2" / "model")
    ids = tokenizer("def ", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, ids.shape[1] + 4)


def test_token_files_hold_the_tokens_of_all_documents(source, tmp_path) -> None:
    prepare, data = part_of_the_program("prepare"), part_of_the_program("data")
    model_dir = source[0] / "gpt2" / "smoke" / "model"
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n\n{"text": "four five"}\n', encoding="utf-8")
    (tmp_path / "b.txt").write_text("six\nseven\n", encoding="utf-8")
    count = prepare.prepare([tmp_path / "a.jsonl", tmp_path / "b.txt"], model_dir, tmp_path / "tokens", "first")
    count += prepare.prepare([tmp_path / "b.txt"], model_dir, tmp_path / "tokens", "second")
    windows = data.Windows(tmp_path / "tokens", 4)
    sizes = [path.stat().st_size // 2 for path in sorted((tmp_path / "tokens").glob("*.bin"))]
    assert sum(sizes) == count
    assert len(windows) == sizes[0] // 4 + sizes[1] // 4
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "tokens")
    ids = [token for index in range(sizes[0] // 4) for token in windows[index]["input_ids"].tolist()]
    assert tokenizer.decode(ids).startswith("one two three<end>four five<end>six\nsev")
    assert (
        windows[sizes[0] // 4]["input_ids"].tolist()
        == np.fromfile(tmp_path / "tokens/second.bin", "uint16")[:4].tolist()
    )


def test_masks_depend_on_seed_epoch_and_index_alone(source) -> None:
    data = part_of_the_program("data")
    windows = data.Windows(source[0] / "gpt2" / "smoke" / "tokens", 512)
    samples, again, others = (data.MaskedWindows(windows, windows.info, seed) for seed in (1, 1, 2))
    first = samples[3]
    assert all(torch.equal(again[3][name], first[name]) for name in first)
    assert not torch.equal(others[3]["labels"], first["labels"])
    assert not torch.equal(samples[4]["labels"], first["labels"])
    again.set_epoch(1)
    assert not torch.equal(again[3]["labels"], first["labels"])
    predicted = first["labels"] != data.IGNORED
    tokens = windows[3]["input_ids"]
    assert torch.equal(first["labels"][predicted], tokens[predicted])
    assert torch.equal(first["input_ids"][~predicted], tokens[~predicted])
    share = [
        sum((each["labels"] != data.IGNORED).float().mean() for each in map(samples.__getitem__, range(100))) / 100
    ]
    assert abs(float(share[0]) - data.PREDICTED) < 0.01
    masked = (first["input_ids"] == windows.info["mask_token"])[predicted].float().mean()
    assert 0.6 < masked < 0.95
