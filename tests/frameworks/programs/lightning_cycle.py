"""Two loaders, of which Lightning reads the shorter one again within the epoch."""

import lightning
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, TensorDataset

import hpcddp.integrations


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def training_step(self, batch, _index):
        return sum((self.linear(x) - y).pow(2).mean() for x, y in batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def load(batches):
    return DataLoader(TensorDataset(torch.randn(batches * 4, 8), torch.randn(batches * 4, 1)), batch_size=4)


torch.manual_seed(0)
trainer = lightning.Trainer(max_epochs=1, enable_checkpointing=False, logger=False, enable_progress_bar=False)
hpcddp.integrations.attach(trainer)
trainer.fit(Model(), CombinedLoader([load(8), load(3)], "max_size_cycle"))
trainer.save_checkpoint("model.ckpt")
