#!/usr/bin/env bash
# SFT by verl's trainer on the GPUs of one node. MODEL is a checkpoint or hub id, DATA a folder with train.parquet.
set -euo pipefail
: "${MODEL:?the model to start from}" "${DATA:?a folder with train.parquet, whose rows have messages}"
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}

# Megatron-Core relies on it with tensor parallelism; it has to be set before CUDA is.
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec torchrun --nproc-per-node="$gpus" -m verl.trainer.sft_trainer \
    'hydra.searchpath=[pkg://megatron_policy.hosts.verl.conf]' engine=megatron_policy optim=megatron \
    model.path="$MODEL" model.use_remove_padding=True \
    engine.tensor_model_parallel_size=2 \
    engine.override_transformer_config.recompute_granularity=full \
    engine.override_transformer_config.recompute_method=uniform \
    engine.override_transformer_config.recompute_num_layers=1 \
    data.train_files="$DATA/train.parquet" data.train_batch_size=256 data.max_token_len_per_gpu=8192 \
    optim.lr=1e-5 optim.lr_warmup_steps_ratio=0.05 optim.lr_decay_style=cosine \
    trainer.n_gpus_per_node="$gpus" trainer.total_epochs=1 'trainer.logger=[console]' "$@"
