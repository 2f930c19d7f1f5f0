#!/usr/bin/env bash
# usage: ray_nodes.sh HOST... -- COMMAND...
# Without Slurm: starts Ray on this machine and, by ssh, on each HOST, waits until all have joined, runs COMMAND here, a
# driver such as `megatron-policy run examples/run_grpo.py ...`, and stops Ray on all of them at its end: every Ray of this
# user there. The exit code is that of COMMAND. All machines need the same environment at the same path, and the same
# ~/.ray/auth_token if there is one.
#   HEAD_IP   this machine's address, if its first one is not in the network of the others
#   RAY_PORT  where Ray's head listens; 6379 by default
set -euo pipefail

hosts=()
while (($# > 0)) && [ "$1" != -- ]; do
    hosts+=("$1")
    shift
done
if (($# < 2)); then
    echo "usage: ray_nodes.sh HOST... -- COMMAND..." >&2
    exit 2
fi
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
address=${HEAD_IP:-$(hostname -I | cut -d' ' -f1)}:${RAY_PORT:-6379}
ray=$(command -v ray)

stop() {
    for host in "${hosts[@]}"; do
        ssh "$host" "$ray" stop || echo "Ray may go on on $host: run \`ray stop\` there" >&2
    done
    ray stop
}

ray start --head --node-ip-address="${address%:*}" --port="${address##*:}" --include-dashboard=false \
    --disable-usage-stats
trap stop EXIT
for host in "${hosts[@]}"; do
    ssh "$host" "$ray" start --address="$address" --disable-usage-stats
done
python "$here/wait_for_nodes.py" "$address" $((${#hosts[@]} + 1))
RAY_ADDRESS=$address "$@"
