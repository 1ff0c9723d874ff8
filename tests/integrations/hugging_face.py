"""Small jobs of `transformers.Trainer`, with random weights and data made from nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

WORDS = [f"w{i}" for i in range(60)]


def arguments(folder: Any, **options: Any) -> TrainingArguments:
    usual = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "save_strategy": "no",
        "max_steps": 12,
    }
    return TrainingArguments(**usual | options)


class Accuracy:
    def __call__(self, prediction: Any) -> dict[str, float]:
        return {
            "accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())
        }


def text_classification(folder: Any, dropout: float = 0.1, **options: Any):
    """Which of two words is there more often, in texts of several lengths."""
    generator = torch.Generator().manual_seed(0)
    rows: dict[str, list[Any]] = {"text": [], "label": []}
    for i in range(44):
        words = [WORDS[int(w)] for w in torch.randint(2, 20, (3 + i % 5,), generator=generator)]
        rows["text"].append(" ".join([*words, *[WORDS[i % 2]] * 3]))
        rows["label"].append(i % 2)
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    tokens = [fast(text) for text in rows["text"]]
    data = datasets.Dataset.from_dict(
        rows | {key: [one[key] for one in tokens] for key in ("input_ids", "attention_mask")}
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            pad_token_id=0,
        )
    )
    return Trainer(
        model,
        arguments(folder, **options),
        train_dataset=data,
        eval_dataset=data.select(range(10)),
        processing_class=fast,
        compute_metrics=Accuracy(),
    )


def padded(rows: Any) -> dict[str, torch.Tensor]:
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = row
    return {"input_ids": ids, "labels": labels}


def causal_lm(folder: Any, callbacks: Any = (), kind: type[Trainer] = Trainer, **options: Any):
    """Rows of 4 to 11 tokens, so that micro-batches differ in their number of tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 12, (44,), generator=generator).tolist()
    rows = [torch.randint(1, 64, (n,), generator=generator).sort().values for n in lengths]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    return kind(
        model,
        arguments(folder, **options),
        train_dataset=rows,
        eval_dataset=rows[:10],
        data_collator=padded,
        callbacks=list(callbacks),
    )


class Halved(Trainer):
    loss_is_scaled_for_ga = False  # the mean over rows of each micro-batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].transpose(1, 2)
        loss = 0.5 * torch.nn.functional.cross_entropy(logits, labels[:, 1:])
        return (loss, outputs) if return_outputs else loss


class Stops(Trainer):
    def evaluate(self, *args, **options):
        self.control.should_training_stop = self.state.global_step >= 6
        return super().evaluate(*args, **options)


@dataclasses.dataclass
class OwnArguments(TrainingArguments):
    temperature: float = 1.0


class FailsAt(Accuracy):
    def __init__(self, call):
        self.call = call

    def __call__(self, prediction):
        self.call -= 1
        if self.call == 0:
            raise RuntimeError("once")
        return super().__call__(prediction)
