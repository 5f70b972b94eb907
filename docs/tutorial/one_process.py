"""Trains a small network on handwritten digits in one process: python one_process.py"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

torch.manual_seed(0)

digits = load_digits()  # 1,797 images of 8x8 pixels, which scikit-learn ships
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, held_out = torch.randperm(len(images)).split([1437, 360])

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for epoch in range(10):
    shuffled = train[torch.randperm(len(train))]
    for batch in shuffled[: len(train) // 64 * 64].split(64):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()

with torch.no_grad():
    correct = (model(images[held_out]).argmax(1) == labels[held_out]).float().mean()
print(f"1 process: {correct:.1%} of the held-out images are right")
