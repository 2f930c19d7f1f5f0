"""One run, from a random model to a checked export; training itself is in sft.py and grpo.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from megatron_policy import ConfigError, Policy, RayVirtualCluster
from megatron_policy.converters.formats.hf_location import locate
from megatron_policy.workers import init_ray

from .checkpoint import make_checkpoint
from .codec import Codec
from .display import Display
from .grpo import Answers, improve, measure
from .journal import Journal
from .rollouts import OwnRollouts, Rollouts, find_vllm, vllm_rollouts
from .settings import GRPO, Imitation, Layout, Lengths, policy_section
from .sft import imitate
from .task import Problems, Questions
from .verify import Comparison, compare

OBJECT_STORE_BYTES = 200 * 2**20


@dataclass(frozen=True)
class Options:
    """One run: the model to start from (None: a new one), how to train, where to run and write."""

    model: str | None
    seed: int
    imitation: Imitation
    grpo: GRPO
    layout: Layout
    output: Path
    vllm: bool = False
    """Whether vLLM samples the answers of GRPO, in place of the policy."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run: answers to the held-out problems, and how the export compares."""

    before: Answers
    after: Answers
    check: Comparison

    @property
    def factor(self) -> float | None:
        """The factor by which GRPO has multiplied the reward; None if there was none before."""
        return self.after.reward / self.before.reward if self.before.reward else None


@dataclass(frozen=True)
class Stage:
    """What both phases need."""

    options: Options
    problems: Questions
    codec: Codec
    cluster: RayVirtualCluster
    display: Display
    journal: Journal


def run(options: Options, problems: Problems, display: Display, journal: Journal) -> Outcome:
    """Make a model, imitate, improve, export, check; leaves checkpoints in `options.output`."""
    if options.vllm:
        find_vllm()  # before minutes of SFT
    given = options.model
    model = new_model(options, problems, display) if given is None else str(locate(given))
    return teach(options, model, problems, Codec(tokenizer_of(model)), display, journal)


def teach(
    options: Options,
    model: str,
    problems: Questions,
    codec: Codec,
    display: Display,
    journal: Journal,
) -> Outcome:
    """Imitate, improve, export and check, from a checkpoint."""
    transformers_logging.disable_progress_bar()
    with cluster_of(options.layout, display) as cluster:
        stage = Stage(options, problems, codec, cluster, display, journal)
        before = imitation(stage, model)
        after, check = improvement(stage)
    return Outcome(before, after, check)


def imitation(stage: Stage, model: str) -> Answers:
    """Run SFT, and write a checkpoint of the result."""
    settings = stage.options.imitation
    calls = -(-settings.steps // settings.steps_per_call)
    with policy_on(stage, model, settings, calls, reference=False) as policy:
        with reporting(stage, "sft", settings.steps, "loss") as report:
            imitate(policy, stage.problems, stage.codec, settings, report)
        return finished(stage, policy, stage.options.output / "sft")


def improvement(stage: Stage) -> tuple[Answers, Comparison]:
    """Run GRPO from the SFT checkpoint, which is also the reference; export the result and check
    it.
    """
    settings, output = stage.options.grpo, stage.options.output
    start = str(output / "sft")
    with policy_on(stage, start, settings, settings.steps, reference=True) as policy:
        with (
            rollouts_of(stage, policy, start) as rollouts,
            reporting(stage, "grpo", settings.steps, "reward") as report,
        ):
            improve(policy, rollouts, stage.problems, stage.codec, settings, report)
        answers = finished(stage, policy, output / "policy")
        return answers, compare(policy, output / "policy", answers.batch)


def finished(stage: Stage, policy: Policy, path: Path) -> Answers:
    """Measure a trained policy and export it."""
    answers = measure(OwnRollouts(policy), stage.codec, stage.problems.held_out)
    stage.display.say(f"reward on held-out problems {answers.reward:.3f}; export to {path}")
    policy.export_hf(path, overwrite=True)
    return answers


@contextmanager
def rollouts_of(stage: Stage, policy: Policy, model: str) -> Iterator[Rollouts]:
    """Who samples for a policy that starts from `model`."""
    if not stage.options.vllm:
        yield OwnRollouts(policy)
        return
    settings, log = stage.options.grpo, stage.options.output / "vllm.log"
    rows, lengths = settings.problems * settings.group_size, _lengths(stage)
    with ExitStack() as stack:
        with stage.display.waiting(f"starting vLLM; it writes to {log}"):
            started = vllm_rollouts(policy, model, stage.codec, lengths, rows, log)
            rollouts = stack.enter_context(started)
        yield rollouts


@contextmanager
def reporting(
    stage: Stage, phase: str, steps: int, curve: str
) -> Iterator[Callable[[dict[str, float]], None]]:
    """Yield a callback for the metrics of each step of a phase: it shows and records them."""
    with stage.display.phase(phase.upper(), steps, curve) as show:

        def report(metrics: dict[str, float]) -> None:
            stage.journal.add(phase, metrics)
            show(metrics)

        yield report


@contextmanager
def policy_on(
    stage: Stage, model: str, settings: Imitation | GRPO, calls: int, *, reference: bool
) -> Iterator[Policy]:
    """A policy on the cluster's workers, for `calls` calls of `train`; shut down afterwards."""
    options, codec = stage.options, stage.codec
    section = policy_section(
        model,
        settings,
        calls,
        options.layout,
        _lengths(stage),
        AutoConfig.from_pretrained(model).get_text_config().hidden_size,
        options.seed,
    )
    workers = f"{options.layout.workers} workers"
    with stage.display.waiting(f"loading {model} on {workers}"):
        policy = Policy(stage.cluster, section, codec.tokenizer, init_reference_model=reference)
    try:
        yield policy
    finally:
        policy.shutdown()


def _lengths(stage: Stage) -> Lengths:
    return stage.codec.lengths(stage.problems.held_out)


@contextmanager
def cluster_of(layout: Layout, display: Display) -> Iterator[RayVirtualCluster]:
    """Room for the workers, on the CPU of this machine; Ray is shut down afterwards."""
    with display.waiting("starting Ray"):
        init_ray(object_store_bytes=OBJECT_STORE_BYTES, log_to_driver=False)
    cluster = RayVirtualCluster([layout.workers], use_gpus=False)
    try:
        yield cluster
    finally:
        cluster.shutdown()
        ray.shutdown()


def new_model(options: Options, problems: Problems, display: Display) -> str:
    """A checkpoint with random weights and a tokenizer made for the task."""
    texts = [problem.prompt + problem.answer for problem in problems.held_out]
    path = make_checkpoint(options.output / "start", texts, options.seed)
    display.say(f"made a Qwen2 with random weights in {path}")
    return str(path)


def tokenizer_of(model: str) -> PreTrainedTokenizerBase:
    """The model's own tokenizer; ConfigError if it has none, or none with an end of sequence."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        # Without files of one, transformers makes some families' tokenizers with an empty
        # vocabulary.
        known = tokenizer.decode(tokenizer("sort")["input_ids"], skip_special_tokens=True)
    except (OSError, ValueError) as error:
        raise ConfigError(_without_tokenizer(model)) from error
    if known.strip() != "sort":
        raise ConfigError(_without_tokenizer(model))
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {model} has no eos_token: set one in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _without_tokenizer(model: str) -> str:
    return (
        f"{model} has no tokenizer, or one that does not give back the word 'sort': copy "
        "tokenizer.json and tokenizer_config.json there from the model it was made from, or leave "
        "out --model to start from a new model with a tokenizer of its own"
    )
