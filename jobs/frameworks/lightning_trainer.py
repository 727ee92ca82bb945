"""Lightning's Trainer without a word about nodes and devices: nothing of hpcddp."""

import argparse

import lightning
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32, help="samples of one rank in each step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def train_dataloader(self):
        # Lightning would put in such a sampler for several ranks only; with it, one rank takes the same order
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank)
        return DataLoader(data, args.batch, sampler=sampler)

    def training_step(self, batch, _index):
        x, y = batch
        return mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.set_default_dtype(torch.float64 if args.double else torch.float32)
torch.manual_seed(0)  # the same data and first weights on every rank
x = torch.randn(1024, 20)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = Model()
quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False, "logger": False}
trainer = lightning.Trainer(max_epochs=args.epochs, precision="64-true" if args.double else "32-true", **quiet)
trainer.fit(model)
if trainer.is_global_zero:
    print(f"{trainer.world_size} ranks")
    torch.save(model.state_dict(), "model.pt")
