"""Another program, which knows transformers and not this library: makes models and data, trains, and generates.

`python stranger.py make FOLDER` makes for each family a model, its tokenizer and chat data, and trains a copy in plain
PyTorch; `python stranger.py generate MODEL PROMPT` prints the tokens that a saved model writes.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

STEPS, BATCH_SIZE, NUM_TESTS, EVAL_EVERY, LR, SEED = 12, 16, 8, 4, 3e-3, 42
PROMPT = "What is 7 times 8?"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "max_position_embeddings": 128},
    "qwen3": {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": True},
}
Row = tuple[torch.Tensor, torch.Tensor]


def make_data(path: Path) -> list[str]:
    """Questions and answers of different lengths, one conversation a line."""
    words = {"plus": int.__add__, "times": int.__mul__}
    pairs = [
        (f"What is {a} {word} {b}?", f"{a} {word} {b} is {compute(a, b)}" + ", as you know" * (a % 3) + ".")
        for a in range(12)
        for b in range(7)  # 168 conversations: 8 to test on, 10 batches an epoch
        for word, compute in words.items()
    ]
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, pair, strict=True)]} for pair in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [text for pair in pairs for text in pair]


def make_tokenizer(texts: Sequence[str]) -> Any:
    encoding: Any = Tokenizer(models.BPE())
    encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoding.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["</s>"], show_progress=False
    )
    encoding.train_from_iterator(texts, trainer)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=encoding, eos_token="</s>")  # noqa: S106
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode(line: str, tokenizer: Any) -> Row:
    messages = json.loads(line)["messages"]
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    return torch.tensor(ids), torch.tensor([-100] * len(prompt) + ids[len(prompt) :])


def collate(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    columns = {
        "input_ids": ([ids for ids, _ in rows], 0),
        "labels": ([labels for _, labels in rows], -100),
        "attention_mask": ([torch.ones_like(ids) for ids, _ in rows], 0),
    }
    return {name: pad_sequence(column, True, fill) for name, (column, fill) in columns.items()}


def batches_of(rows: Sequence[Row]) -> Iterator[dict[str, torch.Tensor]]:
    sampler = DistributedSampler(rows, num_replicas=1, rank=0, seed=SEED)  # type: ignore[arg-type]
    for epoch in range(STEPS):
        sampler.set_epoch(epoch)
        yield from DataLoader(rows, BATCH_SIZE, sampler=sampler, drop_last=True, collate_fn=collate)  # type: ignore[arg-type]


def train(model: Any, rows: Sequence[Row]) -> list[dict[str, float]]:
    """The loop that everybody writes, in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    warmup = STEPS // 10
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda k: (k + 1) / (warmup + 1) if k < warmup else (1 + cos(pi * (k - warmup) / (STEPS - warmup))) / 2,
    )
    tests, lines = collate(rows[:NUM_TESTS]), list[dict[str, float]]()
    batches = batches_of(rows[NUM_TESTS:])
    for step in range(1, STEPS + 1):
        loss = model(**next(batches)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        lines.append({"step": step, "loss": loss.item()})
        if step % EVAL_EVERY == 0:
            with torch.no_grad():
                lines[-1]["eval_loss"] = model(**tests).loss.item()
    return lines


def generate(model: Any, tokenizer: Any) -> list[int]:
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    written = model.eval().generate(**prompt, max_new_tokens=24, min_new_tokens=24, do_sample=False)
    return written[0].tolist()


def make(folder: Path) -> None:
    """For each family: ``model``, ``data.jsonl``, ``log.json`` and ``tokens.json`` of the run in this process."""
    for family, sizes in FAMILIES.items():
        place = folder / family
        place.mkdir(parents=True)
        tokenizer = make_tokenizer(make_data(place / "data.jsonl"))
        config = {**sizes, "vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
        model.save_pretrained(place / "model")
        tokenizer.save_pretrained(place / "model")
        lines = (place / "data.jsonl").read_text(encoding="utf-8").splitlines()
        log = train(model, [encode(line, tokenizer) for line in lines])
        (place / "log.json").write_text(json.dumps(log), encoding="utf-8")
        (place / "tokens.json").write_text(json.dumps(generate(model, tokenizer)), encoding="utf-8")


if __name__ == "__main__":
    verb, path = sys.argv[1:]
    torch.set_num_threads(1)
    if verb == "make":
        make(Path(path))
    else:
        written = generate(AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path))
        sys.stdout.write(json.dumps(written))
    if "colossal" in sys.modules:
        raise SystemExit("This program must know nothing of colossal.")
