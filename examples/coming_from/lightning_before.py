import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.criterion = nn.CrossEntropyLoss()
        self.losses = []

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        lr_scheduler = CosineAnnealingLR(optimizer, T_max=18)
        return [optimizer], [{"scheduler": lr_scheduler, "interval": "step"}]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self.model(x), y)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def on_train_epoch_end(self):
        self.print(f"epoch {self.current_epoch}: " + " ".join(f"{loss:.6f}" for loss in self.losses))
        self.losses.clear()


lightning.seed_everything(1024)
digits = load_digits()
images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
train_set = TensorDataset(images[:1440], labels[:1440])
train_loader = DataLoader(train_set, batch_size=60, shuffle=True)

trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    precision="32-true",
    max_epochs=3,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(dirpath="checkpoints", save_top_k=2, monitor="step", mode="max")],
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Classifier(), train_loader)
