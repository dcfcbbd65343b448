import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(
    mixed_precision="no",
    gradient_accumulation_steps=2,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1024),
)

digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
train_set, test_set = TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])
train_loader = DataLoader(train_set, batch_size=60, shuffle=True)
test_loader = DataLoader(test_set, batch_size=60)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lr_scheduler = CosineAnnealingLR(optimizer, T_max=2 * 18)  # each process steps it once
model, optimizer, train_loader, test_loader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_loader, test_loader, lr_scheduler
)

for epoch in range(3):
    losses = []
    for x, y in train_loader:
        with accelerator.accumulate(model):
            loss = criterion(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.print(f"epoch {epoch}:", *(f"{loss:.6f}" for loss in losses))
    accelerator.save_state(f"checkpoints/epoch-{epoch}")

correct = []
with torch.no_grad():
    for x, y in test_loader:
        predictions, targets = accelerator.gather_for_metrics((model(x).argmax(dim=1), y))
        correct.append((predictions == targets).float())
accelerator.print(f"accuracy {torch.cat(correct).mean().item():.6f}")
