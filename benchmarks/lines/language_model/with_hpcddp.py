# A language model: one batch is a step of four times as many samples, with clipped gradients and a schedule.
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcddp


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.memory = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, 32)

    def forward(self, tokens):
        return self.head(self.memory(self.embedding(tokens))[0])


batch_size, accumulation = 8, 4
with hpcddp.runtime(global_batch=batch_size * accumulation) as rt:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = (torch.randint(32, (960, 1)) + torch.randint(1, 5, (960, 1)) * torch.arange(17)) % 32
    loader = DataLoader(TensorDataset(tokens), batch_size=batch_size, shuffle=True)
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    model, optimizer, scheduler, loader = rt.prepare(model, optimizer, scheduler, loader)
    for epoch in rt.epochs(2):
        total, seen = 0.0, 0
        for (batch,) in loader:
            batch = batch.to(device)
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:])
            rt.backward(loss)
            total += loss.item() * len(batch)
            seen += len(batch)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rt.print(f"epoch {epoch}: loss {rt.sum(total) / rt.sum(seen):.4f}")
    rt.save_model("model.pt")
