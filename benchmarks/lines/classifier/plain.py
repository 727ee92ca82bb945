# An image classifier that is evaluated after each epoch.
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
labels = torch.arange(3000) % 10
images = torch.randn(10, 1, 8, 8)[labels] + 2 * torch.randn(3000, 1, 8, 8)
train = DataLoader(TensorDataset(images[:2500], labels[:2500]), batch_size=60, shuffle=True)
test = DataLoader(TensorDataset(images[2500:], labels[2500:]), batch_size=70)
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

for epoch in range(3):
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in test:
            correct += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    print(f"epoch {epoch}: accuracy {correct / 500:.3f}")
torch.save(model.state_dict(), "model.pt")
