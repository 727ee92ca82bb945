# A stream: samples come one after the other, as from a file that is too large to index.
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hpcddp


class Readings(IterableDataset):
    def __iter__(self):
        numbers = torch.Generator().manual_seed(1)
        for _ in range(1500):
            x = torch.randn(8, generator=numbers)
            yield x, x.cumsum(0)


with hpcddp.runtime() as rt:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(Readings(), batch_size=50)
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = rt.prepare(model, optimizer, loader)
    for epoch in rt.epochs(3):
        total, seen = 0.0, 0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            rt.backward(loss)
            optimizer.step()
            total += loss.item() * len(x)
            seen += len(x)
        rt.print(f"epoch {epoch}: loss {rt.sum(total) / rt.sum(seen):.4f}")
    rt.save_model("model.pt")
