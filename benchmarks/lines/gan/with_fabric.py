# A GAN: two models and two optimizers take turns on each batch.
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
points = torch.tensor([2.0, -1.0]) + 0.3 * torch.randn(2000, 2)
loader = DataLoader(TensorDataset(points), batch_size=50, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
opt_g = torch.optim.Adam(generator.parameters(), lr=0.005, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=0.005, betas=(0.5, 0.999))

generator, opt_g = fabric.setup(generator, opt_g)
discriminator, opt_d = fabric.setup(discriminator, opt_d)
loader = fabric.setup_dataloaders(loader)
torch.manual_seed(fabric.global_rank)  # otherwise all ranks draw the same noise
for epoch in range(6):
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 4, device=device))
        loss_d = softplus(-discriminator(real.to(device))).mean() + softplus(discriminator(fake.detach())).mean()
        opt_d.zero_grad()
        fabric.backward(loss_d)
        opt_d.step()
        loss_g = softplus(-discriminator(fake)).mean()
        opt_g.zero_grad()
        fabric.backward(loss_g)
        opt_g.step()
    fabric.print(f"epoch {epoch}: the generated points have the mean {fake.mean(0).tolist()}")
fabric.save("model.pt", generator.state_dict())
