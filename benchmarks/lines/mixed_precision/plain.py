# Mixed precision: the forward pass in float16, a GradScaler, clipped gradients.
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
inputs = torch.randn(2048, 16)
targets = inputs.sin().sum(1, keepdim=True)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler(device, init_scale=1024.0)

for epoch in range(4):
    total, seen = 0.0, 0
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item() * len(x)
        seen += len(x)
    print(f"epoch {epoch}: loss {total / seen:.4f}")
torch.save(model.state_dict(), "model.pt")
