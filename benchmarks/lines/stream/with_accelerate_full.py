# A stream: samples come one after the other, as from a file that is too large to index.
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Readings(IterableDataset):
    def __iter__(self):
        numbers = torch.Generator().manual_seed(1)
        for _ in range(1500):
            x = torch.randn(8, generator=numbers)
            yield x, x.cumsum(0)


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True))
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
loader = DataLoader(Readings(), batch_size=50)
model = nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
folder, deadline = os.environ["RUN_DIR"], float(os.environ["DEADLINE"])
first, skip = max((tuple(map(int, name.split("-"))) for name in os.listdir(folder)), default=(0, 0))
if (first, skip) != (0, 0):
    accelerator.load_state(f"{folder}/{first}-{skip}")
for epoch in range(first, 3):
    loader.set_epoch(epoch)
    total, seen = 0.0, 0
    for x, y in accelerator.skip_first_batches(loader, skip):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        accelerator.backward(loss)
        optimizer.step()
        total += loss.item() * len(x)
        seen += len(x)
        skip += 1
        if time.time() > deadline:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.save_state(f"{folder}/{epoch}-{skip}")
            raise SystemExit
    total, seen = accelerator.reduce(torch.tensor([total, seen], device=device)).tolist()
    accelerator.print(f"epoch {epoch}: loss {total / seen:.4f}")
    skip = 0
    accelerator.save_state(f"{folder}/{epoch + 1}-{skip}")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
