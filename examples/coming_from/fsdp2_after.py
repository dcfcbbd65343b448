from contextlib import nullcontext

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import colossal
from colossal import comm
from colossal.accelerator import get_current_device
from colossal.booster import Booster
from colossal.booster.plugin import TorchFSDPPlugin
from colossal.cluster import DistCoordinator

colossal.launch_from_torch(verbose=False)
coordinator, device = DistCoordinator(), get_current_device()
plugin = TorchFSDPPlugin()
booster = Booster(plugin=plugin, mixed_precision="fp32", max_norm=1.0)

digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
train_set = TensorDataset(images[:1440], labels[:1440])
train_loader = plugin.prepare_dataloader(train_set, batch_size=60, shuffle=True, seed=1024)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lr_scheduler = CosineAnnealingLR(optimizer, T_max=18)
model, optimizer, criterion, train_loader, lr_scheduler = booster.boost(
    model, optimizer, criterion, train_loader, lr_scheduler
)

for epoch in range(3):
    losses = []
    for number, (x, y) in enumerate(train_loader, start=1):
        takes_step = number % 2 == 0
        with nullcontext() if takes_step else booster.no_sync(model):
            loss = criterion(model(x.to(device)), y.to(device))
            booster.backward(loss / 2, optimizer)
        if takes_step:
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        losses.append(comm.reduce(loss.detach(), "dp").item() / coordinator.world_size)
    coordinator.print_on_master(f"epoch {epoch}: " + " ".join(f"{loss:.6f}" for loss in losses))
    booster.save("checkpoints", model, optimizer, lr_scheduler, step=6 * (epoch + 1), dataloader=train_loader)
