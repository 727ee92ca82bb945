import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(train_set, batch_size=256, shuffle=True)
test = DataLoader(test_set, batch_size=256)

best = 0.0
for epoch in range(20):
    model.train()
    for x, y in train:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        correct = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in test)
    accuracy = correct / len(test_set)
    print(f"epoch {epoch}: accuracy {accuracy:.1%}")
    if accuracy > best:
        best = accuracy
        torch.save(model.state_dict(), "best.pt")
