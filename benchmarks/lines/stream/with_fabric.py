# A stream: samples come one after the other, as from a file that is too large to index.
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Readings(IterableDataset):
    def __iter__(self):
        numbers = torch.Generator().manual_seed(1)
        for number in range(1500):
            x = torch.randn(8, generator=numbers)
            if number % fabric.world_size == fabric.global_rank:
                yield x, x.cumsum(0)


fabric = Fabric()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
loader = DataLoader(Readings(), batch_size=50)
model = nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for epoch in range(3):
    total, seen = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        fabric.backward(loss)
        optimizer.step()
        total += loss.item() * len(x)
        seen += len(x)
    total, seen = fabric.all_reduce(torch.tensor([total, seen], device=device), reduce_op="sum").tolist()
    fabric.print(f"epoch {epoch}: loss {total / seen:.4f}")
fabric.save("model.pt", model.state_dict())
