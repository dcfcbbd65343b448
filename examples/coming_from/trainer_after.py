import json
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_cosine_schedule_with_warmup,
)

import colossal
from colossal import comm
from colossal.accelerator import get_current_device
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.cluster import DistCoordinator

tokenizer = AutoTokenizer.from_pretrained("inputs/model")
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
chats = [json.loads(line)["messages"] for line in Path("inputs/data.jsonl").read_text().strip().split("\n")]
texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
samples = [tokenizer(text, truncation=True, max_length=64) for text in texts]
train_set, eval_set = samples[:192], samples[192:255]


def compute_metrics(eval_prediction):
    predictions, labels = eval_prediction
    predictions, labels = predictions[:, :-1], labels[:, 1:]  # position i predicts token i + 1
    return {"accuracy": (predictions == labels)[labels != -100].mean()}


colossal.launch_from_torch(verbose=False)
coordinator, device = DistCoordinator(), get_current_device()
plugin = TorchDDPPlugin()
booster = Booster(plugin=plugin, mixed_precision="fp32", max_norm=1.0)
train_loader = plugin.prepare_dataloader(train_set, 8, shuffle=True, seed=1024, collate_fn=collator)
eval_loader = plugin.prepare_dataloader(eval_set, 8, collate_fn=collator)

model = AutoModelForCausalLM.from_pretrained("inputs/model", dtype=torch.float32).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
lr_scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=12)
model, optimizer, _, train_loader, lr_scheduler = booster.boost(
    model, optimizer, dataloader=train_loader, lr_scheduler=lr_scheduler
)

losses = []
for epoch in range(2):
    for batches in zip(*[iter(train_loader)] * 2, strict=True):  # two batches for each step
        weight = booster.weight_by_tokens([batch["labels"] for batch in batches], causal=True)
        step_loss = torch.zeros((), device=device)
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else booster.no_sync(model):
                loss = weight(model(**batch).loss, batch["labels"])
                booster.backward(loss, optimizer)
            step_loss += loss.detach()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        losses.append(comm.reduce(step_loss, "dp").item() / coordinator.world_size)
    booster.save("checkpoints", model, optimizer, lr_scheduler, step=6 * (epoch + 1), dataloader=train_loader)


def pad(tensor):
    return torch.nn.functional.pad(tensor, (0, 64 - tensor.shape[1]), value=-100)


model.eval()
gathered = {"predictions": [], "labels": []}
with torch.no_grad():
    for batch in eval_loader:
        predictions = model(**batch).logits.argmax(dim=-1)
        values = {"predictions": pad(predictions), "labels": pad(batch["labels"].to(device))}
        for name, tensor in booster.gather_for_metrics(values, eval_loader).items():
            gathered[name].append(tensor.cpu())
metrics = compute_metrics([torch.cat(tensors).numpy() for tensors in gathered.values()])
booster.save_model(model, "model", shard=True, use_safetensors=True)
coordinator.print_on_master("losses " + " ".join(f"{loss:.6f}" for loss in losses))
coordinator.print_on_master(f"accuracy {metrics['accuracy']:.6f}")
