# A stream: samples come one after the other, as from a file that is too large to index.
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Readings(IterableDataset):
    def __iter__(self):
        numbers = torch.Generator().manual_seed(1)
        for _ in range(1500):
            x = torch.randn(8, generator=numbers)
            yield x, x.cumsum(0)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
loader = DataLoader(Readings(), batch_size=50)
model = nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for epoch in range(3):
    total, seen = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.item() * len(x)
        seen += len(x)
    print(f"epoch {epoch}: loss {total / seen:.4f}")
torch.save(model.state_dict(), "model.pt")
