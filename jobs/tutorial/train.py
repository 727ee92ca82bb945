import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcddp

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1536], labels[:1536])
test_set = TensorDataset(images[1536:], labels[1536:])
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(32 * 16, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(train_set, batch_size=256, shuffle=True)
test = DataLoader(test_set, batch_size=256)

with hpcddp.runtime(seed=0) as rt:
    model, optimizer, train, test = rt.prepare(model, optimizer, train, test)
    for epoch in rt.epochs(20):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            rt.backward(loss)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
        accuracy = rt.sum(correct) / len(test_set)
        rt.print(f"epoch {epoch}: accuracy {accuracy:.1%}")
        if rt.save_best(accuracy):
            rt.save_model("best.pt")
