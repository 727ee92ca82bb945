"""Lightning in a Slurm job whose requeue it would ask for at SIGUSR1: with the one line of hpcddp it does not."""

import os

import lightning
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.utils.data import DataLoader, TensorDataset

import hpcddp.integrations


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def training_step(self, batch, _index):
        return self.linear(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


os.environ |= {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False, "logger": False}
trainer = lightning.Trainer(max_epochs=1, devices=1, plugins=[SLURMEnvironment()], **quiet)
hpcddp.integrations.attach(trainer, save_every=2)
trainer.fit(Model(), DataLoader(TensorDataset(torch.arange(48.0).reshape(48, 1)), batch_size=4))
