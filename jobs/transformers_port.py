"""A tiny Llama from `transformers` on lines of Python: padded batches, the mean over valid
tokens."""

# docs/ports/transformers_llama.py, made elastic: 4 virtual workers of 4 lines instead of 16 lines
# at once.
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import elastic_dp as edp

batch_size, learning_rate, max_steps, seed = 16, 3e-3, 200, 0
device = "cuda" if torch.cuda.is_available() else "cpu"
source = (Path(sysconfig.get_path("stdlib")) / "typing.py").read_bytes()
lines = [list(line[:96]) for line in source.split(b"\n") if len(line) > 1]


def collate(rows):
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


def loss_fn(model, batch):
    # transformers averages over valid tokens: their number is what the micro-batch weighs.
    return model(**batch).loss, (batch["labels"][:, 1:] != -100).sum()


def train(ctx):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scheduler = get_linear_schedule_with_warmup(optimizer, 20, max_steps)

    for step in ctx.steps(model, optimizer, loss_fn, scheduler=scheduler, clip_norm=1.0):
        if step.number % 10 == 0:
            ctx.log({"loss": step.loss})


if __name__ == "__main__":
    data = edp.MapStyleData(lines, micro_batch_size=batch_size // 4, seed=seed, collate_fn=collate)
    scaling = edp.ScalingConfig(max_workers=2, virtual_workers=4)
    edp.ElasticTrainer(train, data=data, scaling=scaling, max_steps=max_steps).fit()
