"""A cell of a notebook: Accelerate's notebook_launcher starts the ranks of one node. Nothing of hpcddp."""

import argparse

import torch
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import DataLoaderConfiguration
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
parser.add_argument("--batch", type=int, default=64, help="samples in each step, over all ranks")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()


def train() -> None:
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    sampling = DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True)  # --batch is the global one
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=sampling)
    torch.manual_seed(0)  # the same data and first weights on every rank
    x = torch.randn(1024, 20)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), args.batch, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(args.epochs):
        for x, y in loader:
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    if accelerator.is_main_process:
        print(f"loss {loss.item():.4f} on {accelerator.num_processes} ranks")
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    notebook_launcher(train, num_processes=args.ranks)
