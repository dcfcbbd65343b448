import torch
import torch.distributed.checkpoint as dcp
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

device = torch.device("cpu")  # or the GPU of LOCAL_RANK
dist.init_process_group()

digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
train_set = TensorDataset(images[:1440], labels[:1440])
sampler = DistributedSampler(train_set, shuffle=True, seed=1024)
train_loader = DataLoader(train_set, batch_size=60, sampler=sampler)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy())
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lr_scheduler = CosineAnnealingLR(optimizer, T_max=18)

for epoch in range(3):
    sampler.set_epoch(epoch)
    losses = []
    for number, (x, y) in enumerate(train_loader, start=1):
        takes_step = number % 2 == 0
        model.set_requires_gradient_sync(takes_step)
        loss = criterion(model(x.to(device)), y.to(device))
        (loss / 2).backward()
        if takes_step:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}:", *(f"{loss:.6f}" for loss in losses))
    model_states, optimizer_states = get_state_dict(model, optimizer)
    states = {"model": model_states, "optimizer": optimizer_states, "lr_scheduler": lr_scheduler.state_dict()}
    dcp.save(states, checkpoint_id=f"dcp/step-{6 * (epoch + 1)}")
dist.destroy_process_group()
