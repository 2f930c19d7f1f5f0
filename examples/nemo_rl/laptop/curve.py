"""Prints a run of GRPO step by step: what it was rewarded with, and how far the engine's
log-probabilities of its own tokens are from the policy's.

`python curve.py LOGS`, LOGS being `logger.log_dir` of a run with `logger.tensorboard_enabled=true`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

COLUMNS = {
    "train/reward": "8.3f",
    "train/token_mult_prob_error": "30.7f",
    "train/gen_kl_error": "21.1e",
    "train/mean_gen_tokens_per_sample": "35.2f",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", type=Path)
    # NeMo RL counts the runs that have logged to a folder.
    found = sorted(parser.parse_args().logs.glob("exp_*/tensorboard"))
    if not found:
        parser.error("no run has logged there for TensorBoard")
    events = EventAccumulator(str(found[-1])).Reload()
    steps = {tag: {each.step: each.value for each in events.Scalars(tag)} for tag in COLUMNS}
    widths = {tag: int(form.split(".")[0]) for tag, form in COLUMNS.items()}
    print("step", *(tag.removeprefix("train/").rjust(widths[tag] - 1) for tag in COLUMNS))
    for step in steps["train/reward"]:
        print(f"{step:4}" + "".join(f"{steps[tag][step]:{form}}" for tag, form in COLUMNS.items()))


if __name__ == "__main__":
    main()
