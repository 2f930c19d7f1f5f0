#!/usr/bin/env bash
#SBATCH --job-name=megatron-policy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
# usage: MEGATRON_POLICY=/its/checkout sbatch [--nodes=N ...] slurm_ray.sh COMMAND...
# Starts Ray on all nodes of the job, waits until all have joined, and runs COMMAND, a driver such as
# `megatron-policy run examples/run_grpo.py ...`, on the first. The job ends with COMMAND, and with its exit code.
#   GPUS_PER_NODE  GPUs that Ray hands out on a node; by default what Slurm gives
#   HEAD_IP        the first node's address, if its first one is not in the nodes' network
#   RAY_PORT       where Ray's head listens; by default one that follows from the job's number
#   SRUN_ARGS      more options of srun, such as --container-image=...
set -euo pipefail
: "${SLURM_JOB_ID:?submit this script with sbatch}" "${MEGATRON_POLICY:?the checkout of megatron-policy}"
: "${1:?the command that drives the policy}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
gpus=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
# This script runs on the first node.
address=${HEAD_IP:-$(hostname -I | cut -d' ' -f1)}
port=${RAY_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
read -ra more <<<"${SRUN_ARGS:-}"
# Only processes of this job can join this Ray, or give it work; releases without tokens ignore this.
RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_MODE RAY_AUTH_TOKEN

on() { # NODE COMMAND...: on that node, beside what runs there already
    srun --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist="$1" --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" \
        "${more[@]}" "${@:2}"
}
wait_for() { # NUMBER: of nodes that have joined
    on "$head" python "$MEGATRON_POLICY/examples/cluster/wait_for_nodes.py" "$address:$port" "$1"
}

echo "Ray on ${#nodes[@]} nodes of $gpus GPUs: ${nodes[*]}"
on "$head" ray start --block --head --node-ip-address="$address" --port="$port" --num-gpus="$gpus" \
    --include-dashboard=false --disable-usage-stats &
wait_for 1
for node in "${nodes[@]:1}"; do
    on "$node" ray start --block --address="$address:$port" --num-gpus="$gpus" --disable-usage-stats &
done
wait_for "${#nodes[@]}"
# What this starts in the background, Slurm ends with this script.
on "$head" env RAY_ADDRESS="$address:$port" "$@"
