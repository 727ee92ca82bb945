# Metrics that need all predictions at once: the area under the ROC curve, and the precision of the best 50.
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def area_under_curve(scores, targets):
    ranks = scores.argsort().argsort() + 1.0
    positives = targets.sum()
    return (ranks[targets == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(targets) - positives))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = torch.randn(3000, 12)
targets = (inputs @ torch.randn(12) + 2 * torch.randn(3000) > 3).float()
train = DataLoader(TensorDataset(inputs[:2000], targets[:2000]), batch_size=50, shuffle=True)
test = DataLoader(TensorDataset(inputs[2000:], targets[2000:]), batch_size=128)
model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(3):
    total, seen = 0.0, 0
    for x, y in train:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        seen += len(x)
    with torch.no_grad():
        found = [(model(x.to(device)), y.to(device)) for x, y in test]
    scores, truth = (torch.cat(parts) for parts in zip(*found, strict=True))
    area, best = area_under_curve(scores, truth), truth[scores.topk(50).indices].mean()
    print(f"epoch {epoch}: loss {total / seen:.4f}, area {area:.4f}, best 50 {best:.2f}")
torch.save(model.state_dict(), "model.pt")
