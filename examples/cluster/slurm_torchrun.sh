#!/usr/bin/env bash
#SBATCH --job-name=megatron-policy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
# usage: sbatch [--nodes=N ...] slurm_torchrun.sh SCRIPT.py ARGUMENTS...
# Starts one torchrun on each node of the job, and by it SCRIPT.py once for each GPU. A rank that fails ends the job.
#   GPUS_PER_NODE  processes on a node; by default what Slurm gives
#   MASTER_PORT    where torchrun's agents meet on the first node; by default one that follows from the job's number
#   SRUN_ARGS      more options of srun, such as --container-image=...
set -euo pipefail
: "${SLURM_JOB_ID:?submit this script with sbatch}" "${1:?the program that every rank runs}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
read -ra more <<<"${SRUN_ARGS:-}"

echo "${#nodes[@]} nodes of $gpus GPUs: ${nodes[*]}"
exec srun --nodes="${#nodes[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 "${more[@]}" \
    torchrun --nnodes="${#nodes[@]}" --nproc-per-node="$gpus" --max-restarts=0 \
    --rdzv-backend=c10d --rdzv-endpoint="${nodes[0]}:$port" --rdzv-id="$SLURM_JOB_ID" \
    "$@"
