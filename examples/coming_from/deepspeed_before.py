import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

config = {
    "train_micro_batch_size_per_gpu": 60,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}
deepspeed.init_distributed()

digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
train_set = TensorDataset(images[:1440], labels[:1440])

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
criterion = nn.CrossEntropyLoss()
engine, optimizer, train_loader, lr_scheduler = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    training_data=train_set,
    lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=18),
    config=config,
)

for epoch in range(3):
    train_loader.data_sampler.set_epoch(epoch)
    losses = []
    for x, y in train_loader:
        loss = criterion(engine(x.to(engine.device)), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"epoch {epoch}:", *(f"{loss:.6f}" for loss in losses))
    engine.save_checkpoint("checkpoints", tag=f"step-{6 * (epoch + 1)}", client_state={"step": 6 * (epoch + 1)})
