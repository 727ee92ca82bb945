"""transformers' Trainer: nothing of hpcddp. Writes what this rank saw to the folder argv[1]."""

import json
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

seen: list[int] = []


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return {"x": torch.tensor([float(index)]), "labels": torch.tensor([0.0])}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x=None, labels=None):
        seen.extend(int(value) for value in x.flatten())
        out = self.linear(x)
        return {"loss": (out - labels).pow(2).mean(), "logits": out}


arguments = TrainingArguments(
    sys.argv[1],
    per_device_train_batch_size=4,
    num_train_epochs=1,
    learning_rate=1e-4,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(Model(), arguments, train_dataset=Numbers()).train()
found = {"world_size": arguments.world_size, "seen": seen}
Path(sys.argv[1], f"rank-{arguments.process_index}.json").write_text(json.dumps(found))
