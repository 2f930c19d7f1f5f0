"""Samples with a vLLM of its own and says what its model makes of the samples: a process that
`megatron-policy parity --engine vllm` starts in vLLM's environment.

`python -m megatron_policy.inference.vllm.sample FOLDER` reads `JOB` there and writes `SAMPLED`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_policy.inference.vllm.engine import VllmEngine

JOB, SAMPLED, REFUSED = "job.json", "sampled.json", "refused.json"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sample(job: dict[str, Any]) -> dict[str, Any]:
    """Continue the prompts at temperature 1 and without filters, then score the whole rows.

    `rows` are the prompts with their continuations, `sampled` the engine's log-probabilities of
    these as it drew them, `scored` those of all tokens but each row's first, read as prompts.
    """
    import vllm

    llm = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        seed=job["seed"],
        max_model_len=job["tokens"] + 1,  # vLLM scores a prompt when it continues it
        max_num_seqs=len(job["prompts"]),
        skip_tokenizer_init=job["text"] is None,
        enforce_eager=True,
        disable_log_stats=True,
        trust_remote_code=False,
    )
    engine, prompts = VllmEngine(llm), job["prompts"]
    count = job["tokens"] - len(prompts[0])
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": job["seed"]}
    drawn = engine.generate(prompts, max_tokens=count, min_tokens=count, ignore_eos=True, **plain)
    rows = [prompt + list(done.token_ids) for prompt, done in zip(prompts, drawn, strict=True)]
    defaults, neutral = llm.get_default_sampling_params(), vllm.SamplingParams()
    return {
        "version": vllm.__version__,
        "rows": rows,
        "sampled": [
            [
                found[token].logprob
                for token, found in zip(each.token_ids, each.logprobs, strict=True)
            ]
            for each in drawn
        ],
        "scored": engine.logprobs(rows),
        "defaults": {
            name: getattr(defaults, name)
            for name in _DEFAULTS
            if getattr(defaults, name) != getattr(neutral, name)
        },
        "text_ids": None if job["text"] is None else llm.get_tokenizer().encode(job["text"]),
    }


def main(folder: Path) -> None:
    """Do what the job in `folder` says; write the result there, or the error."""
    try:
        result = sample(json.loads((folder / JOB).read_text()))
        (folder / SAMPLED).write_text(json.dumps(result))
    except Exception as error:  # said again in the process that waits for this one
        (folder / REFUSED).write_text(json.dumps(f"{type(error).__name__}: {error}"))
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
