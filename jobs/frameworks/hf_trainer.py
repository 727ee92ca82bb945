"""transformers' Trainer with a model of one's own: nothing of hpcddp."""

import argparse

import torch
from torch.nn.functional import mse_loss
from transformers import Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32, help="samples of one rank in each step")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--double", action="store_true", help="float64, to compare runs with each other")
args = parser.parse_args()
torch.set_default_dtype(torch.float64 if args.double else torch.float32)
torch.manual_seed(0)  # the same data and first weights on every rank
x = torch.randn(1024, 20)
data = [{"x": sample, "labels": sample.sum(0, keepdim=True)} for sample in x]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def forward(self, x):
        return self.layers(x)


class MyTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        guess = model(inputs["x"])
        loss = mse_loss(guess, inputs["labels"])
        return (loss, {"logits": guess}) if return_outputs else loss


arguments = TrainingArguments(
    "out",
    remove_unused_columns=False,  # forward takes no labels: compute_loss does
    per_device_train_batch_size=args.batch,
    num_train_epochs=args.epochs,
    learning_rate=0.01,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = MyTrainer(Model(), arguments, train_dataset=data)
trainer.train()
if trainer.is_world_process_zero():
    print(f"{arguments.world_size} ranks")
    torch.save(trainer.model.state_dict(), "model.pt")
