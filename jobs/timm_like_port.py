"""An image classifier trained as timm does it: mixup, label smoothing, and an EMA of the
weights."""

# docs/ports/timm_like.py, made elastic: 4 virtual workers of 16 images instead of 64 at once.
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic_dp as edp

batch_size, learning_rate, epochs, mixup_alpha, smoothing, seed = 64, 4e-3, 10, 0.2, 0.1, 0
device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = torch.utils.data.TensorDataset(images[360:], labels[360:])
test_set = torch.utils.data.TensorDataset(images[:360], labels[:360])


def make_model():
    layers = []
    for inputs, outputs in ((1, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10))


def loss_fn(model, batch):
    x, y = (tensor.to(device) for tensor in batch)
    share = torch.distributions.Beta(mixup_alpha, mixup_alpha).sample().to(device)
    other = torch.randperm(len(x), device=device)
    logits = model(share * x + (1 - share) * x[other])
    mine = F.cross_entropy(logits, y, label_smoothing=smoothing)
    return share * mine + (1 - share) * F.cross_entropy(logits, y[other], label_smoothing=smoothing)


@torch.no_grad()
def evaluate(model, batch):
    x, y = (tensor.to(device) for tensor in batch)
    logits = model(x)
    return F.cross_entropy(logits, y), len(y), {"accuracy": (logits.argmax(1) == y).float().mean()}


def train(ctx):
    torch.manual_seed(seed)
    model = make_model().to(device)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ctx.total_steps)
    test = edp.MapStyleData(test_set, micro_batch_size=120)

    # The EMA changes in the loop's body, once per step on every worker: `state` hands it to those
    # that join.
    for step in ctx.steps(model, optimizer, loss_fn, scheduler=scheduler, state={"ema": ema}):
        ema.update_parameters(model)
        if step.epoch_end:
            ctx.log({"loss": step.loss} | ctx.evaluate(evaluate, test, model=ema))


if __name__ == "__main__":
    data = edp.MapStyleData(train_set, micro_batch_size=batch_size // 4, epochs=epochs, seed=seed)
    edp.ElasticTrainer(train, data=data, scaling=edp.ScalingConfig(virtual_workers=4)).fit()
