# A language model: gradients of four batches are accumulated and clipped, and the learning rate follows a schedule.
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.memory = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens):
        return self.head(self.memory(self.embedding(tokens))[0])


batch_size, accumulation = 8, 4
config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
accelerator = Accelerator(gradient_accumulation_steps=accumulation, dataloader_config=config)
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tokens = (torch.randint(32, (960, 1)) + torch.randint(1, 5, (960, 1)) * torch.arange(17)) % 32
loader = DataLoader(TensorDataset(tokens), batch_size=batch_size, shuffle=True)
model = LanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
folder, deadline = os.environ["RUN_DIR"], float(os.environ["DEADLINE"])
step = max(map(int, os.listdir(folder)), default=0)
if step:
    accelerator.load_state(f"{folder}/{step}")
first, skip = divmod(step, len(loader))
for epoch in range(first, 2):
    loader.set_epoch(epoch)
    total, seen = 0.0, 0
    for (batch,) in accelerator.skip_first_batches(loader, skip):
        batch = batch.to(device)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
            accelerator.backward(loss)
            total += loss.item() * len(batch)
            seen += len(batch)
            step += 1
            if accelerator.sync_gradients:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if time.time() > deadline:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    accelerator.save_state(f"{folder}/{step}")
                    raise SystemExit
    skip = 0
    total, seen = accelerator.reduce(torch.tensor([total, seen], device=device)).tolist()
    accelerator.print(f"epoch {epoch}: loss {total / seen:.4f}")
    accelerator.save_state(f"{folder}/{step}")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
