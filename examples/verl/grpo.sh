#!/usr/bin/env bash
# GRPO by verl's trainer with vLLM on the GPUs of one node. MODEL is a checkpoint or hub id, DATA a folder with
# train.parquet and test.parquet, as verl prepares them.
set -euo pipefail
: "${MODEL:?the model to start from}" "${DATA:?a folder with train.parquet and test.parquet}"
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}

# Megatron-Core relies on it with tensor parallelism; it has to be set before CUDA is.
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec python -m verl.trainer.main_ppo \
    'hydra.searchpath=[pkg://megatron_policy.hosts.verl.conf]' model_engine=megatron_policy \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.engine.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.engine.param_offload=True \
    actor_rollout_ref.actor.engine.optimizer_offload=True \
    actor_rollout_ref.actor.engine.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.actor.engine.override_transformer_config.recompute_method=uniform \
    actor_rollout_ref.actor.engine.override_transformer_config.recompute_num_layers=1 \
    'actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]' trainer.save_freq=20 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    trainer.n_gpus_per_node="$gpus" trainer.nnodes=1 trainer.total_epochs=1 'trainer.logger=[console]' "$@"
