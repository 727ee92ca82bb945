# An image classifier that is evaluated after each epoch.
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True))
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
labels = torch.arange(3000) % 10
images = torch.randn(10, 1, 8, 8)[labels] + 2 * torch.randn(3000, 1, 8, 8)
train = DataLoader(TensorDataset(images[:2500], labels[:2500]), batch_size=60, shuffle=True)
test = DataLoader(TensorDataset(images[2500:], labels[2500:]), batch_size=70)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
folder, deadline = os.environ["RUN_DIR"], float(os.environ["DEADLINE"])
step = max(map(int, os.listdir(folder)), default=0)
if step:
    accelerator.load_state(f"{folder}/{step}")
first, skip = divmod(step, len(train))
for epoch in range(first, 3):
    train.set_epoch(epoch)
    model.train()
    for x, y in accelerator.skip_first_batches(train, skip):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        if time.time() > deadline:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.save_state(f"{folder}/{step}")
            raise SystemExit
    skip = 0
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            correct += accelerator.gather_for_metrics(model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    accelerator.print(f"epoch {epoch}: accuracy {correct / 500:.3f}")
    accelerator.save_state(f"{folder}/{step}")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
