# A language model: gradients of four batches are accumulated and clipped, and the learning rate follows a schedule.
import torch
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
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tokens = (torch.randint(32, (960, 1)) + torch.randint(1, 5, (960, 1)) * torch.arange(17)) % 32
loader = DataLoader(TensorDataset(tokens), batch_size=batch_size, shuffle=True)
model = LanguageModel().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

for epoch in range(2):
    total, seen = 0.0, 0
    for number, (batch,) in enumerate(loader, start=1):
        batch = batch.to(device)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
        (loss / accumulation).backward()
        total += loss.item() * len(batch)
        seen += len(batch)
        if number % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: loss {total / seen:.4f}")
torch.save(model.state_dict(), "model.pt")
