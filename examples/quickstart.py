import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import colossal
from colossal.accelerator import get_current_device
from colossal.booster import Booster
from colossal.booster.plugin import TorchDDPPlugin
from colossal.cluster import DistCoordinator

mesh = colossal.launch_from_torch(verbose=False)  # 1. launch
coordinator, device = DistCoordinator(), get_current_device()

digits = load_digits()  # 2. build
images, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
train_set = TensorDataset(images[:1440], labels[:1440])
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
adam, criterion = torch.optim.Adam(net.parameters(), lr=3e-3), torch.nn.CrossEntropyLoss()

plugin = TorchDDPPlugin()  # 3. plugin
loader = plugin.prepare_dataloader(train_set, batch_size=32, shuffle=True)
booster = Booster(plugin=plugin)  # 4. boost
model, optimizer, criterion, loader, _ = booster.boost(net, adam, criterion, loader)

losses = []
for _ in range(8):  # 5. train
    started = time.perf_counter()
    for x, y in loader:
        loss = criterion(model(x.to(device)), y.to(device))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    speed = f"{len(train_set) / (time.perf_counter() - started):,.0f} samples/s"
    with torch.no_grad():  # on digits that it has not seen
        accuracy = (model(images[1440:].to(device)).argmax(1).cpu() == labels[1440:]).float().mean()
    coordinator.print_on_master(f"step {len(losses):3}  loss {losses[-1]:.3f}  accuracy {accuracy:.3f}  {speed}")
booster.save_model(model, "digits.pt")  # 6. save
