"""Data of users that the examples read: what is not as described is named with its place, and nothing is read twice."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from colossal.errors import ConfigError
from colossal.testing import make_finetuning_inputs

sys.path.insert(0, str(Path(__file__).parents[2]))
finetuning = importlib.import_module("examples.finetune.data")
pretraining = importlib.import_module("examples.pretrain.prepare")
sys.path.pop(0)

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_finetuning_inputs(tmp_path_factory.mktemp("inputs"))[0]


@pytest.fixture(scope="module")
def ending(folder, tmp_path_factory) -> Path:
    """A tokenizer that ends every text itself, as those of T5 and of some embedding models do."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    path = tmp_path_factory.mktemp("ending")
    tokenizer.save_pretrained(path)
    return path


def write(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a", "messages": CHAT}, "Found the keys text, messages in .*:2. Rename or remove keys"),
        ({"text": "a", "prompt": "a", "completion": "b"}, "Found the keys text, prompt, completion in .*:2"),
        (
            {"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]},
            "roles human, gpt in .*:2",
        ),
        ({"messages": [CHAT[0], {"role": "Assistant", "content": "b"}]}, "roles user, Assistant in .*:2. Rename them"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "is a string, .* Found None in .*:2"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, CHAT[1]]},
            "Write its text as one",
        ),
    ],
)
def test_a_line_that_would_be_learned_otherwise_is_refused(row, message, folder, tmp_path) -> None:
    path = write(tmp_path / "data.jsonl", {"text": "a"}, row)
    with pytest.raises(ConfigError, match=message):
        finetuning.read(path, AutoTokenizer.from_pretrained(folder), 64, pack=False)


def test_a_prompt_beside_messages_and_roles_of_a_template_are_read(folder, tmp_path) -> None:
    rows = {"messages": CHAT, "prompt": "a"}, {"messages": [*CHAT, {"role": "ipython", "content": "c"}]}
    found = finetuning.read(
        write(tmp_path / "data.jsonl", *rows), AutoTokenizer.from_pretrained(folder), 64, pack=False
    )
    assert len(found) == 2
    assert found[0] == found[1]


def test_a_tokenizer_that_ends_texts_itself_ends_them_once(folder, ending, tmp_path) -> None:
    rows = {"text": "hello"}, {"prompt": "hello", "completion": "b"}
    path = write(tmp_path / "data.jsonl", *rows)
    plain, other = (
        finetuning.read(path, AutoTokenizer.from_pretrained(each), 64, pack=False) for each in (folder, ending)
    )
    assert other == plain
    ids, labels = other[1]
    assert labels[-1] == ids[-1] != finetuning.IGNORED
    assert ids.count(ids[-1]) == 1
    corpus = write(tmp_path / "text.jsonl", {"text": "hello"})
    numbers = [pretraining.prepare([corpus], each, tmp_path) for each in (folder, ending)]
    assert numbers == [len(other[0][0])] * 2
    assert np.fromfile(tmp_path / "tokens.bin", dtype=np.uint16).tolist() == other[0][0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"content": "b"}', "Found an object with content in .*a.jsonl:2. Rename the key"),
        ("a.jsonl", b'{"text": null}', "Found an object with text in .*a.jsonl:1"),
        ("a.jsonl", b'{"text": "a"', "Found .* in .*a.jsonl:1"),
        ("a.jsonl", b'["a"]', "in .*a.jsonl:1"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "Found .* in .*a.jsonl.gz. Unpack"),
    ],
)
def test_a_corpus_that_is_no_text_is_refused_by_its_place(name, content, message, folder, tmp_path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        pretraining.prepare([path], folder, tmp_path)


def test_a_corpus_and_images_that_are_not_there_are_refused(folder, tmp_path) -> None:
    for path, found in ((tmp_path, "a directory"), (tmp_path / "none.txt", "no file")):
        with pytest.raises(ConfigError, match=f"Found {found} at .* Pass the files, as corpus"):
            pretraining.prepare([path], folder, tmp_path / "output")
    with pytest.raises(ConfigError, match=r"Found no images\.npy and no labels\.npy in .* Write them by numpy\.save"):
        importlib.import_module("examples.pretrain.data").Images(tmp_path)


def test_a_corpus_shorter_than_a_window_is_refused(folder, tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "hello"})
    num_tokens = pretraining.prepare([path], folder, tmp_path)
    windows = importlib.import_module("examples.pretrain.data").Windows
    assert len(windows(tmp_path, num_tokens)) == 1
    with pytest.raises(ConfigError, match=rf"Found {num_tokens} tokens in 1 files .* Pass a smaller --length"):
        windows(tmp_path, num_tokens + 1)
    (tmp_path / "tokens.bin").unlink()
    with pytest.raises(ConfigError, match="Found 0 tokens in 0 files"):
        windows(tmp_path, 4)


def test_a_sample_is_not_predicted_from_the_one_before_it(folder, tmp_path) -> None:
    rows = [{"text": ""}, {"text": "one two"}, {"prompt": "", "completion": "three"}]
    rows += [{"messages": [{"role": "assistant", "content": "four"}]}]
    path = write(tmp_path / "a.jsonl", *rows)

    class Endless:
        """The tokenizer, of which texts have no end: an empty one has no token."""

        eos_token_id = None

        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def __call__(self, *args: Any, **options: Any) -> Any:
            return self._tokenizer(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for each in (tokenizer, Endless(tokenizer)):
        samples = finetuning.read(path, each, 100, pack=False)
        assert all(labels == [finetuning.IGNORED, *ids[1:]][: len(ids)] for ids, labels in samples)
        (ids, labels), *_ = finetuning.read(path, each, sum(len(ids) for ids, _ in samples), pack=True)
        assert ids == [token for sample, _ in samples for token in sample]
        assert labels == [label for _, sample in samples for label in sample]


def test_tokens_that_are_not_all_or_of_another_tokenizer_are_not_trained_on(folder, tmp_path) -> None:
    good, bad = (
        write(tmp_path / "good.jsonl", {"text": "hello"}),
        write(tmp_path / "bad.jsonl", {"text": "a"}, {"x": 1}),
    )
    out = tmp_path / "out"
    pretraining.prepare([good], folder, out)
    tokens = (out / "tokens.bin").read_bytes()
    for name in ("tokens", "more"):
        with pytest.raises(ConfigError, match="an object with x"):
            pretraining.prepare([bad], folder, out, name)
    assert [(path.name, path.read_bytes()) for path in out.glob("*.bin")] == [("tokens.bin", tokens)]
    info = json.loads((out / "tokens.json").read_text()) | {"vocab_size": 70000, "dtype": "uint32"}
    (out / "tokens.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match=r"Found tokens\.bin of another one in .* Pass another --output"):
        pretraining.prepare([good], folder, out, "more")
    with pytest.raises(ConfigError, match="Found no tokens.json"):
        importlib.import_module("examples.pretrain.data").Windows(tmp_path, 4)


def test_images_and_labels_must_be_as_many(tmp_path) -> None:
    for name, shape in (("images", (3, 1, 2, 2)), ("labels", (4,))):
        np.save(tmp_path / f"{name}.npy", np.zeros(shape, dtype=np.uint8))
    with pytest.raises(ConfigError, match="Found 3 images and 4 labels"):
        importlib.import_module("examples.pretrain.data").Images(tmp_path)
