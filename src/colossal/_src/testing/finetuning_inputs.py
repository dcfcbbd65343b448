"""A small language model and its data, as programs that fine-tune find them on disk."""

import ast
import json
import sysconfig
from pathlib import Path
from typing import Any

from colossal.errors import ConfigError

_MODULES = ("argparse", "ast", "calendar", "datetime", "decimal", "inspect", "optparse", "pickle", "tarfile", "typing")
_SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
_SIZES = {"vocab_size": 512, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
_GATED = {"intermediate_size": 176, "num_key_value_heads": 2, "tie_word_embeddings": False}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_FAMILIES = {"gpt2": _NO_DROPOUT, "llama": _GATED, "qwen3": {**_GATED, "head_dim": 16}}
_CHAT_TEMPLATE = (
    "{% for each in messages %}<{{ each.role }}>{{ each.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_WORDS_OF_A_LINE = 3


def make_finetuning_inputs(folder: str | Path, family: str = "llama", **config: Any) -> tuple[Path, Path]:
    """Make a small Hugging Face model with its tokenizer, and chat data, for tests and tutorials without a download.

    The model has random weights, two layers and a byte-level vocabulary of 512 tokens. The data has a question and an
    answer for each line of documentation in ten modules of Python's standard library, about 1,000 conversations.

    Args:
        folder: Where both go; it is made.
        family: ``"llama"``, ``"gpt2"`` or ``"qwen3"``.
        **config: What the configuration of the model has otherwise, such as ``num_hidden_layers=4``.

    Returns:
        The directory that `from_pretrained` loads, ``folder/model``, and the JSONL file, ``folder/data.jsonl``, whose
        lines have ``messages``.

    Raises:
        ConfigError: The family is another one.

    Example:
        >>> import json, tempfile
        >>> from colossal.testing import make_finetuning_inputs
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model_dir, data = make_finetuning_inputs(folder)
        ...     json.loads((model_dir / "config.json").read_text())["num_hidden_layers"]
        2
    """
    if family not in _FAMILIES:
        raise ConfigError(f"The family must be one of {', '.join(_FAMILIES)}. Found {family!r}. Pass one of them.")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    model_dir, data = folder / "model", folder / "data.jsonl"
    lines = {name: _docstring_lines(name) for name in _MODULES}
    tokenizer = _train_tokenizer([line for each in lines.values() for line in each])
    tokenizer.save_pretrained(model_dir)
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    sizes = {**_SIZES, "max_position_embeddings": 256, **_FAMILIES[family], **tokens, **config}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32)
    model.save_pretrained(model_dir)
    pairs = [(f"Tell me about {name}.", line) for name, each in lines.items() for line in each][::2]
    rows = [[{"role": "user", "content": ask}, {"role": "assistant", "content": line}] for ask, line in pairs]
    data.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return model_dir, data


def _docstring_lines(module: str) -> list[str]:
    """Documentation of a module of the standard library, nothing where this Python has no file for it."""
    path = Path(sysconfig.get_path("stdlib")) / f"{module}.py"
    if not path.is_file():
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    lines = [line.strip() for node in nodes for line in (ast.get_docstring(node) or "").splitlines()]
    return [line for line in lines if len(line.split()) >= _WORDS_OF_A_LINE]


def _train_tokenizer(lines: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    encoding: Any = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_SIZES["vocab_size"], initial_alphabet=alphabet, special_tokens=[*_SPECIAL], show_progress=False
    )
    encoding.train_from_iterator(lines, trainer)
    pad, end, *_ = _SPECIAL
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=encoding, pad_token=pad, eos_token=end)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
