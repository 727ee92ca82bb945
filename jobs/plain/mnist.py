"""The MNIST loop of the tutorials, with DDP and images from a folder: DIR/train/CLASS/*.png and DIR/val/CLASS/*.png"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

parser = argparse.ArgumentParser()
parser.add_argument("--data", default="images")
parser.add_argument("--batch", type=int, default=32, help="images of one rank in each step")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--workers", type=int, default=2, help="loader processes per rank")
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    view = transforms.Compose([transforms.Grayscale(), transforms.Resize((28, 28)), transforms.ToTensor()])
    train, test = (datasets.ImageFolder(f"{args.data}/{part}", view) for part in ("train", "val"))
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(32 * 6 * 6, len(train.classes))).to(device)
    model = nn.parallel.DistributedDataParallel(net, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch, sampler=sampler, num_workers=args.workers)
    mine = torch.utils.data.Subset(test, range(dist.get_rank(), len(test), dist.get_world_size()))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        with torch.no_grad():  # net, not model: ranks have different numbers of images
            answers = [(net(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in DataLoader(mine, 64)]
        correct = torch.stack(answers).sum()
        dist.all_reduce(correct)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {correct.item() / len(test):.3f}")
            torch.save(net.state_dict(), "model.pt")


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
