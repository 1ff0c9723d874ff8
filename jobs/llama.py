"""Fine-tunes a Llama from Hugging Face files on your text, and writes Hugging Face files.

    python jobs/llama.py                                        a tiny Llama on the standard library
    python jobs/llama.py --model meta-llama/Llama-3.2-1B --text 'books/**/*.txt' --gpu
                                                                one worker per GPU, bf16
    python jobs/llama.py --local                                no Ray, in this process

`--model` is a folder of Hugging Face files (config.json, model.safetensors, tokenizer.json) or a
name on the hub. Without it a tiny one is written, and nothing is downloaded. The text is tokenized
and packed once, into a folder that all machines must see. Needs
`pip install 'elastic_dp[jobs,text]'`.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import tokenizers
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import elastic_dp as edp
from elastic_dp.dataprep import convert

CACHE = Path("~/.cache/elastic_dp").expanduser()
STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}/json/*.py"


def load(model: str, **options: object) -> torch.nn.Module:
    # The kernels of flash attention are not deterministic: see docs/gpu.md.
    return AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager", **options)


def loss_fn(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    tokens = batch["tokens"].long()  # [rows, length]
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def train(ctx: edp.TrainContext) -> None:
    """Runs in every worker."""
    name, lr = ctx.config["model"], ctx.config["lr"]
    if ctx.is_source:
        model = load(name)
    else:  # this worker receives the weights
        config = AutoConfig.from_pretrained(name)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().to(ctx.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
    how = {"scheduler": warm_up, "clip_norm": 1.0, "precision": ctx.config["precision"]}
    for step in ctx.steps(model, optimizer, loss_fn, **how):
        if step.number % 10 == 0:
            ctx.log({"loss": step.loss, "lr": step.lr})


def write_tiny_llama(folder: Path) -> None:
    """Hugging Face files of a model of 0.1 million parameters, whose tokens are bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<|endoftext|>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=vocabulary["<|endoftext|>"],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def write_tokens(model: str, text: str, length: int, folder: Path) -> None:
    """Rows of `length` tokens, unless they are there already."""
    if folder.exists():
        return
    tokenizer = Path(model, "tokenizer.json")
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    convert(
        text,
        str(aside),
        tokenizer=str(tokenizer) if tokenizer.exists() else model,
        pack=length,
    )
    aside.rename(folder)


def make_trainer(
    *,
    model: str | None = None,
    text: str = STANDARD_LIBRARY,
    data: str | None = None,
    length: int = 128,
    workers: int = 2,
    virtual_workers: int = 4,
    micro_batch_size: int = 4,
    gpu: bool = False,
    steps: int = 100,
    lr: float | None = None,
    name: str | None = None,
    storage_path: str | None = None,
) -> edp.ElasticTrainer:
    """The job as a value."""
    folder = Path(data) if data else CACHE / "llama"
    if model is None:
        model, lr = str(folder / "model"), lr or 3e-3
        if not Path(model).exists():
            write_tiny_llama(Path(model))
    rows = folder / f"tokens-{length}"
    write_tokens(model, text, length, rows)
    return edp.ElasticTrainer(
        train,
        name=name,
        storage_path=storage_path,
        config={"model": model, "lr": lr or 2e-5, "precision": "bf16" if gpu else None},
        data=edp.DataConfig(str(rows), micro_batch_size=micro_batch_size),
        scaling=edp.ScalingConfig(
            max_workers=workers,
            virtual_workers=virtual_workers,
            resources_per_worker={"CPU": 1, "GPU": 1} if gpu else {"CPU": 1},
        ),
        checkpoint=edp.CheckpointConfig(every_s=600),
        max_steps=steps,
    )


def save(trainer: edp.ElasticTrainer, result: edp.Result, folder: str) -> None:
    """Hugging Face files of the final weights, which `from_pretrained` opens."""
    name = trainer.spec.config["model"]
    model = load(name)
    model.load_state_dict(result.load_state().model)
    model.save_pretrained(folder)
    if not Path(name, "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(name).save_pretrained(folder)
    else:
        Path(folder, "tokenizer.json").write_bytes(Path(name, "tokenizer.json").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a folder of Hugging Face files, or a name on the hub")
    parser.add_argument("--text", default=STANDARD_LIBRARY, help="a file, glob or folder of text")
    parser.add_argument("--data", help="folder for the tokens, shared by all machines")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--virtual-workers", type=int, default=4, help="fixes the global batch")
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--gpu", action="store_true", help="one for each worker, and bf16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--name", help="of the run; the same name again continues it")
    parser.add_argument("--storage-path", help="where runs are kept: a folder or any fsspec URL")
    parser.add_argument("--output", default="llama-tuned", help="folder of the tuned model")
    parser.add_argument("--local", action="store_true", help="in this process, without Ray")
    args = vars(parser.parse_args())
    local, output = args.pop("local"), args.pop("output")
    trainer = make_trainer(**args)
    result = trainer.fit(local=local)
    save(trainer, result, output)
    print(f"final loss {result.metrics['loss']:.4f} after {result.step} steps, in {output}")
    print(f"weights sha256 {result.weights_sha256}")


if __name__ == "__main__":
    main()
