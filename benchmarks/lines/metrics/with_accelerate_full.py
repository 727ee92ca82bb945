# Metrics that need all predictions at once: the area under the ROC curve, and the precision of the best 50.
import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def area_under_curve(scores, targets):
    ranks = scores.argsort().argsort() + 1.0
    positives = targets.sum()
    return (ranks[targets == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(targets) - positives))


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True))
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = torch.randn(3000, 12)
targets = (inputs @ torch.randn(12) + 2 * torch.randn(3000) > 3).float()
train = DataLoader(TensorDataset(inputs[:2000], targets[:2000]), batch_size=50, shuffle=True)
test = DataLoader(TensorDataset(inputs[2000:], targets[2000:]), batch_size=128)
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
folder, deadline = os.environ["RUN_DIR"], float(os.environ["DEADLINE"])
step = max(map(int, os.listdir(folder)), default=0)
if step:
    accelerator.load_state(f"{folder}/{step}")
first, skip = divmod(step, len(train))
for epoch in range(first, 3):
    train.set_epoch(epoch)
    total, seen = 0.0, 0
    for x, y in accelerator.skip_first_batches(train, skip):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x.to(device)), y.to(device))
        accelerator.backward(loss)
        optimizer.step()
        total += loss.item() * len(x)
        seen += len(x)
        step += 1
        if time.time() > deadline:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.save_state(f"{folder}/{step}")
            raise SystemExit
    skip = 0
    with torch.no_grad():
        found = [accelerator.gather_for_metrics((model(x.to(device)), y.to(device))) for x, y in test]
    scores, truth = (torch.cat(parts) for parts in zip(*found, strict=True))
    area, best = area_under_curve(scores, truth), truth[scores.topk(50).indices].mean()
    total, seen = accelerator.reduce(torch.tensor([total, seen], device=device)).tolist()
    accelerator.print(f"epoch {epoch}: loss {total / seen:.4f}, area {area:.4f}, best 50 {best:.2f}")
    accelerator.save_state(f"{folder}/{step}")
accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
