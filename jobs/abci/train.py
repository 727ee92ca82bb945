"""ResNet on a folder of images, on any number of nodes: the article's training, corrected.

python train.py --data DIR     DIR/train/CLASS/*.jpg, DIR/val/CLASS/*.jpg
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision.transforms import v2

import hpcddp

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--model", default="resnet50")
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--lr", type=float, default=0.1, help="for a global batch of 256, whatever the number of nodes")
parser.add_argument("--side", type=int, default=224, help="of the images in pixels")
parser.add_argument("--workers", type=int, default=16, help="loader processes per rank")
parser.add_argument("--exact", action="store_true", help="the same weights, bit for bit, on 1 to 32 ranks")
args = parser.parse_args()

to_tensor = [
    v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True),
    v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
]
train_view = v2.Compose([v2.RandomResizedCrop(args.side), v2.RandomHorizontalFlip(), *to_tensor])
test_view = v2.Compose([v2.Resize(args.side), v2.CenterCrop(args.side), *to_tensor])
train_set = datasets.ImageFolder(f"{args.data}/train", train_view)
test_set = datasets.ImageFolder(f"{args.data}/val", test_view)

torch.manual_seed(0)
model = models.get_model(args.model, num_classes=len(train_set.classes))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
train = DataLoader(train_set, batch_size=256, shuffle=True, num_workers=args.workers, pin_memory=True)
test = DataLoader(test_set, batch_size=64, num_workers=args.workers)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(train))

with hpcddp.runtime(seed=0, exact=args.exact, slices=32 if args.exact else None) as rt:
    model, optimizer, scheduler, train, test = rt.prepare(model, optimizer, scheduler, train, test)  # resumes here
    for epoch in rt.epochs(args.epochs):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            for images, labels in rt.micro_batches(batch):  # with --exact several, else one
                with torch.autocast(rt.device.type, torch.bfloat16, enabled=rt.device.type == "cuda"):
                    loss = cross_entropy(model(images), labels)
                rt.backward(loss)
            optimizer.step()
            scheduler.step()
        model.eval()
        with torch.no_grad():
            correct = sum((model(images).argmax(1) == labels).sum() for images, labels in test)
        rt.print(f"epoch {epoch}: accuracy {rt.sum(correct) / len(test_set):.3f}")
    rt.save_model("model.pt")
