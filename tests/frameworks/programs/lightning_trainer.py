"""Lightning's Trainer with no word about devices or nodes: nothing of hpcddp. Writes what this rank saw to argv[1]."""

import json
import sys
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, _index):
        self.seen += [int(value) for value in batch[0].flatten()]
        return self.linear(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


model = Model()
quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False, "logger": False}
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **quiet)
trainer.fit(model, DataLoader(TensorDataset(torch.arange(48.0).reshape(48, 1)), batch_size=4))
found = {"world_size": trainer.world_size, "seen": model.seen}
Path(sys.argv[1], f"rank-{trainer.global_rank}.json").write_text(json.dumps(found))
