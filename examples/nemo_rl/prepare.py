"""Makes what the examples train on a laptop: a tiny checkpoint, its tokenizer, and sums as data.

`python -m examples.nemo_rl.prepare FOLDER`, without a network.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.quickstart.checkpoint import make_checkpoint

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Concatenates the messages, and ends an answer with the end-of-text token."""

LARGEST, HELD_BACK = 9, 20
ROWS, LEARNING_RATE = 32, 3e-3


def sums() -> Iterator[tuple[str, str, str]]:
    """Every sum of two digits as a question, its answer, and a wrong answer."""
    for first in range(LARGEST + 1):
        for second in range(LARGEST + 1):
            right = first + second
            yield f"{first} + {second} = ", boxed(right), boxed(right + 1)


def boxed(number: int) -> str:
    """An answer in the form that NeMo RL's mathematics environment expects."""
    return rf"\boxed{{{number}}}"


def _bare(answer: str) -> str:
    return answer.removeprefix(r"\boxed{").removesuffix("}")


def write_data(folder: Path, seed: int) -> None:
    """Write `sums.jsonl` (input, output), `pairs.jsonl` (prompt, chosen, rejected: a wrong sum) and
    `forms.jsonl` (rejected: the sum in the wrong form), and for each a `val_` file with the
    held-out sums.
    """
    found = list(sums())
    random.Random(seed).shuffle(found)
    for prefix, part in (("", found[HELD_BACK:]), ("val_", found[:HELD_BACK])):
        _write(folder / f"{prefix}sums.jsonl", ({"input": q, "output": a} for q, a, _ in part))
        pairs = ({"prompt": q, "chosen": a, "rejected": wrong} for q, a, wrong in part)
        _write(folder / f"{prefix}pairs.jsonl", pairs)
        forms = ({"prompt": q, "chosen": a, "rejected": _bare(a)} for q, a, _ in part)
        _write(folder / f"{prefix}forms.jsonl", forms)


def _write(path: Path, rows: Iterator[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path, steps: int, seed: int) -> Path:
    """A Qwen2 of two layers, trained on `steps` batches of the sums: enough to answer in the right
    form and to be right now and then.
    """
    path = make_checkpoint(folder, [question + answer for question, answer, _ in sums()], seed)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    texts = [f"{question}{answer}{tokenizer.eos_token}" for question, answer, _ in sums()]
    draw = random.Random(seed)
    for _ in range(steps):
        batch = tokenizer(draw.sample(texts, ROWS), return_tensors="pt", padding=True)
        batch.pop("token_type_ids", None)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60, help="batches that the model has seen")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_data(folder, options.seed)
    write_model(folder / "model", options.steps, options.seed)
    print(f"export TINY={folder}")


if __name__ == "__main__":
    main()
