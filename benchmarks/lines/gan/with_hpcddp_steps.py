# The GAN with accumulation: each global batch is gone over twice, once for each optimizer.
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

import hpcddp

with hpcddp.runtime() as rt:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    points = torch.tensor([2.0, -1.0]) + 0.3 * torch.randn(2000, 2)
    loader = DataLoader(TensorDataset(points), batch_size=50, shuffle=True)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to(device)
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    opt_g = torch.optim.Adam(generator.parameters(), lr=0.005, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(discriminator.parameters(), lr=0.005, betas=(0.5, 0.999))
    generator, discriminator, opt_g, opt_d, loader = rt.prepare(generator, discriminator, opt_g, opt_d, loader)
    for epoch in rt.epochs(6):
        for step in loader.steps():
            opt_d.zero_grad()
            for (real,) in step:
                fake = generator(torch.randn(len(real), 4, device=device)).detach()
                loss_d = softplus(-discriminator(real.to(device))).mean() + softplus(discriminator(fake)).mean()
                rt.backward(loss_d)
                opt_d.step()
            opt_g.zero_grad()
            for (real,) in step:
                fake = generator(torch.randn(len(real), 4, device=device))
                loss_g = softplus(-discriminator(fake)).mean()
                rt.backward(loss_g)
                opt_g.step()
        rt.print(f"epoch {epoch}: the generated points have the mean {fake.mean(0).tolist()}")
    rt.save_model("model.pt", generator)
