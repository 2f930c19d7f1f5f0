"""One rank's policy: training, scoring, generation, refit and checkpoints over a built model.

Shapes: B rows of this data-parallel rank, S positions, K candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.checkpoint.report import SaveReport
from megatron_policy.config import PolicyConfig
from megatron_policy.config.notes import described
from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.interfaces.engine import EngineBuilder
from megatron_policy.interfaces.loss import LossFunction
from megatron_policy.interfaces.metrics import MetricsWriter
from megatron_policy.lm_head.sampling import Continuations
from megatron_policy.memory.states import (
    CHANGE_WEIGHTS,
    FORWARD,
    TRAIN_STEP,
)
from megatron_policy.monitoring.library_warnings import collect_warnings
from megatron_policy.monitoring.writers import configured_writers
from megatron_policy.parallel.groups import Groups
from megatron_policy.policy import driver_names
from megatron_policy.policy.checkpointing import AnyPath, Checkpoints, source_dtypes
from megatron_policy.policy.driver_names import delegate
from megatron_policy.policy.generation import TextGenerator
from megatron_policy.policy.monitoring import PolicyMonitoring
from megatron_policy.policy.probing import EngineProbing
from megatron_policy.policy.scoring import PolicyScoring
from megatron_policy.policy.session import Session
from megatron_policy.policy.weight_exports import WeightExports
from megatron_policy.training.accumulate import GradientAccumulator
from megatron_policy.training.batching import Batcher
from megatron_policy.training.checks import check_head
from megatron_policy.training.dry_run import DryRun, dry_run
from megatron_policy.training.empty_steps import EmptySteps
from megatron_policy.training.pieces import StepPieces
from megatron_policy.training.step import Training
from megatron_policy.training.train import train
from megatron_policy.training.value_checks import with_temperature


class MegatronPolicy:
    """A Hugging Face checkpoint as a Megatron-Core model: train it, score with it, export it.

    Every rank of the layout makes one, under torchrun, in Ray workers, or alone in one process.
    Every method is collective, except `summary`, `report` and `write_metrics`: all ranks call it in
    the same order. Each data-parallel replica passes its own rows, and all ranks of a replica pass
    the same rows.

    Attributes:
        config (PolicyConfig): the checked configuration.
        tokenizer (Any): the tokenizer that was given, or None.
        accumulator (GradientAccumulator): takes an optimizer step in parts, as data arrive:
            `begin`, `microbatch`, `finish`, `abort`.
        pieces (StepPieces): what a step consists of, for loops of other frameworks.
        memory (DeviceMemory): what is on the device and what in host memory: `enter`, `onload`,
            `offload`.
        exporter (Exporter): plans and streams the weights as Hugging Face tensors;
            `exporter.plan()` is what a refit sends.
        probing (EngineProbing): what a driver's probe of an engine asks of a rank.
        loaded (LoadReport | None): what a checkpoint has restored; None for a policy that starts
            from `config.model_name`.
        rank (int): the number of this rank.
        topology (Topology): the layout: how many ranks there are along each of its axes.
        coords (Coords): where this rank is along each axis.
    """

    def __init__(
        self,
        config: PolicyConfig | Mapping[str, Any],
        tokenizer: Any = None,
        *,
        weights_path: AnyPath | None = None,
        optimizer_path: AnyPath | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        timeout_s: float | None = None,
        engine: EngineBuilder | None = None,
        writers: Sequence[MetricsWriter] = (),
    ) -> None:
        """Join the process group, build this rank's part of the model and load its weights.

        `tokenizer` is any object with `pad_token_id` and `eos_token_id`; only `generate` needs one.
        If it can be saved (`save_pretrained`), exports and checkpoints have it in place of the
        model's own. With `weights_path` the policy starts from a checkpoint, whose report is
        `loaded`; the reference is `config.reference_model_name`, else `config.model_name`.
        No collective waits longer than `timeout_s` seconds, by default the config's
        `collective_timeout_s`. `engine` builds this rank's part of the model, by default of
        Megatron-Core. `writers`, and those of `config.metrics`, get the policy's metrics: only
        those of rank 0 are used, and `shutdown` closes them.
        ConfigError for a layout, ConversionError or CheckpointError for unfit files.
        """
        self.config = PolicyConfig.parse(config)
        self.tokenizer = tokenizer
        all_writers = [*writers, *configured_writers(self.config.metrics)]
        with collect_warnings():
            self._session = Session(
                self.config,
                init_optimizer=init_optimizer,
                init_reference_model=init_reference_model,
                timeout_s=self.config.collective_timeout_s if timeout_s is None else timeout_s,
                source_dtypes=source_dtypes(self.config, weights_path, init_reference_model),
                builder=engine or _default_engine(self.config),
                tokenizer=tokenizer,
            )
        self.rank, self.topology = self._session.rank, self._session.topology
        self.coords, self._engine = self._session.coords, self._session.engine
        self._batcher = Batcher.of(self.config, self.topology, self._engine.table)
        self._scoring = PolicyScoring(self.config, self._session, self._batcher)
        self._monitoring = PolicyMonitoring(self.config, self._session, all_writers)
        self._exports = WeightExports(self._session, self._monitoring.metrics)
        self.probing = EngineProbing(self.config, self._session, self._batcher, self._exports)
        self.exporter, self.memory = self._session.exporter, self._session.memory
        empty_steps = EmptySteps.of(self.config, self._engine.table.architecture)
        state = self._session.state
        held = (self._engine, self._batcher, self.memory, state, empty_steps)
        self._training = Training(*held, self.config.rollout_mismatch, state.count_step)
        self.pieces = StepPieces(self._training)
        record = self._monitoring.record_training
        self.accumulator = GradientAccumulator(self._training, self.config, record)
        self._continue = TextGenerator(
            self.config, tokenizer, self._engine, self.coords.dp, self._batcher.longest.tokens
        )
        draws = {"sampling": self._continue.generator}
        self._checkpoints = Checkpoints(self._session, self.config, tokenizer, draws)
        self.loaded = self._checkpoints.start_from(weights_path, optimizer_path)
        self._monitoring.announce()

    def __repr__(self) -> str:
        if not hasattr(self, "loaded"):
            return f"{type(self).__name__}(not started)"
        what = described(self.config, self._engine.table, self.topology)
        where = f"rank {self.rank} of {self.topology.world_size}"
        return f"{type(self).__name__}({what}, {where}, step {self.steps})"

    @property
    def steps(self) -> int:
        """How many optimizer steps were taken, also before a resume."""
        return self._session.state.steps

    @property
    def groups(self) -> Groups:
        """The process groups that this rank belongs to."""
        return self._engine.groups

    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
        temperature: float | torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step per `gbs` samples (of all replicas), in microbatches of `mbs`.

        `data` is this replica's share: `input_ids` int64 `[B, S]` right padded, `sample_mask`
        `[B]`, `token_mask` `[B, S]` and whatever else the loss reads. Returns a `TrainResult`.
        `eval_mode` only computes the loss. Log-probabilities and logits are at `temperature`, a
        number or one for each row `[B]`, by default that of `generation`. BatchError for invalid
        data, LossError for a loss that cannot be trained on, on every rank; the policy stays
        usable.
        """
        trainable = None if eval_mode else self._session.trainable
        self.memory.check("train()", TRAIN_STEP if trainable else FORWARD)
        if trainable:
            self._session.state.expect_gather()
        result = train(
            self._training,
            with_temperature(data, temperature),
            loss_fn,
            gbs or self.config.train_global_batch_size,
            mbs or self.config.train_micro_batch_size,
            eval_mode=eval_mode,
        )
        return self._monitoring.record_training(result, eval_mode)

    def dry_run(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        *,
        temperature: float | torch.Tensor | None = None,
    ) -> DryRun:
        """Try a loss on the first rows of `data`, in the form `train` takes, before training.

        Returns what the loss was given and what it returned, its gradient, and warnings about what
        training relies on. Nothing of the policy changes: weights, gradients, random numbers and
        steps are those before. Errors are those of `train`.
        """
        self.memory.ready("dry_run()")
        return dry_run(self._training, with_temperature(data, temperature), loss_fn)

    begin_train_step = delegate("accumulator", GradientAccumulator.begin)
    train_microbatch = delegate("accumulator", GradientAccumulator.microbatch)
    finish_train_step = delegate("accumulator", GradientAccumulator.finish)
    abort_train_step = delegate("accumulator", GradientAccumulator.abort)
    logprobs = delegate("_scoring", PolicyScoring.logprobs)
    get_logprobs = delegate("_scoring", PolicyScoring.get_logprobs)
    entropy = delegate("_scoring", PolicyScoring.entropy)
    get_entropy = delegate("_scoring", PolicyScoring.get_entropy)
    topk_logits = delegate("_scoring", PolicyScoring.topk_logits)
    get_topk_logits = delegate("_scoring", PolicyScoring.get_topk_logits)
    values = delegate("_scoring", PolicyScoring.values)
    get_values = delegate("_scoring", PolicyScoring.get_values)
    score = delegate("_scoring", PolicyScoring.score)
    reference = delegate("_scoring", PolicyScoring.reference)
    reference_logprobs = delegate("_scoring", PolicyScoring.reference_logprobs)
    get_reference_policy_logprobs = delegate(
        "_scoring", PolicyScoring.get_reference_policy_logprobs
    )
    use_reference_model = reference

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> Continuations:
        """Continue right-padded prompts (`input_ids` `[B, S]`, `input_lengths` `[B]`)."""
        self.memory.ready("generate()")
        check_head(self._engine.table.architecture)
        return self._continue(data, greedy)

    export_hf = delegate("_exports", WeightExports.export_hf)
    export_peft = delegate("_exports", WeightExports.export_peft)
    export = delegate("_exports", WeightExports.export)
    refit = delegate("_exports", WeightExports.refit)
    begin_refit = delegate("_exports", WeightExports.begin_refit)
    finish_refit = delegate("_exports", WeightExports.finish_refit)
    probe = delegate("probing", EngineProbing.probe)
    summary = delegate("_monitoring", PolicyMonitoring.summary)
    report = delegate("_monitoring", PolicyMonitoring.report)
    write_metrics = delegate("_monitoring", PolicyMonitoring.write_metrics)
    profile = delegate("_monitoring", PolicyMonitoring.profile)
    prepare_for_training = delegate("memory", driver_names.prepare_for_training)
    finish_training = delegate("memory", driver_names.finish_training)
    offload_before_refit = delegate("memory", driver_names.offload_before_refit)
    offload_after_refit = delegate("memory", driver_names.offload_after_refit)
    prepare_for_generation = delegate("memory", driver_names.prepare_for_generation)
    finish_inference = delegate("memory", driver_names.finish_inference)
    prepare_for_lp_inference = delegate("memory", driver_names.prepare_for_lp_inference)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parameters and persistent buffers by their global Megatron-Core names, its
        adapters last.
        """
        self.memory.ready("named_parameters()", CHANGE_WEIGHTS)
        adapters = self._engine.adapters
        own = [pair for pair in adapters.held if pair[0].adapts] if adapters else []
        return ((entry.megatron, parameter) for entry, parameter in [*self._engine.held, *own])

    def decoder_layers(self) -> Iterator[tuple[int, torch.nn.Module]]:
        """This rank's decoder layers by global number. Their outputs are `[S, B, D]`; under
        sequence parallelism S is this tensor-parallel rank's share of the positions.
        """
        return self._engine.decoder_layers()

    def save_checkpoint(
        self,
        weights_path: AnyPath,
        optimizer_path: AnyPath | None = None,
        tokenizer_path: AnyPath | None = None,
        *,
        host_data: Mapping[str, Any] | None = None,
        hf_export: AnyPath | None = None,
        onload: bool = False,
    ) -> SaveReport | None:
        """Write what is needed to resume; see `Checkpoints.save`. Then export to `hf_export`."""
        report = self._checkpoints.save(
            self.steps, weights_path, optimizer_path, tokenizer_path, host_data, hf_export, onload
        )
        self._monitoring.metrics.saved(report)
        if hf_export is not None:
            self.export_hf(hf_export, overwrite=True)
        return report

    load_checkpoint = delegate("_checkpoints", Checkpoints.load)

    def finalize_async_save(self) -> SaveReport | None:
        """Wait for a running save, if any; returns its report. CheckpointError if it failed."""
        report = self._checkpoints.finish()
        self._monitoring.metrics.saved(report)
        return report

    def shutdown(self) -> None:
        """Wait for a running save and a refit under way, close the writers, and leave the process
        groups; can be called again.
        """
        with closing(self._session), closing(self._monitoring.metrics), self._exports.ending():
            self.finalize_async_save()
            self._checkpoints.leave()


def _default_engine(config: PolicyConfig) -> EngineBuilder:
    """The engine that the configuration enables, imported only when used."""
    if engine_of(config) is Engine.MEGATRON_CORE:
        from megatron_policy.engines.megatron.platform import prepare_platform

        prepare_platform()  # importing Megatron-Core then compiles nothing on a CPU
        from megatron_policy.engines.megatron import assemble as megatron_core

        return megatron_core
    from megatron_policy.engines.hugging_face import assemble

    return assemble
