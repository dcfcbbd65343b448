import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

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


model = AutoModelForCausalLM.from_pretrained("inputs/model", dtype=torch.float32)
arguments = TrainingArguments(
    output_dir="checkpoints",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
    seed=1024,
    data_seed=1024,
    save_strategy="epoch",
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=train_set,
    eval_dataset=eval_set,
    data_collator=collator,
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model("model")
if trainer.is_world_process_zero():
    print("losses", *(f"{row['loss']:.6f}" for row in trainer.state.log_history if "loss" in row))
    print(f"accuracy {metrics['eval_accuracy']:.6f}")
