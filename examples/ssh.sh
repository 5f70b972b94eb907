#!/bin/bash
# Trains on several machines that ssh reaches, with the same folder at the same place on each:
#   examples/ssh.sh "alpha beta" 4 examples/train.py --epochs 3
# The first host has rank 0. The first failure ends the script and the other ranks.
set -euo pipefail
if (($# < 3)); then
  echo "usage: $0 \"HOST HOST...\" RANKS_A_HOST SCRIPT [ARGUMENTS]" >&2
  exit 2
fi
read -ra hosts <<<"$1"
ranks=$2
shift 2
port=${MASTER_PORT:-29500}
folder=$(pwd)
torchrun=${TORCHRUN:-$folder/.venv/bin/torchrun}

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
for node in "${!hosts[@]}"; do
  settings=()
  for name in "${!OURS_@}"; do settings+=("$name=${!name}"); done
  command=(env "${settings[@]}" "$torchrun" --nnodes="${#hosts[@]}" --node_rank="$node" --nproc_per_node="$ranks"
    --master_addr="${hosts[0]}" --master_port="$port" "$@")
  # -tt: the remote processes end with the connection.
  ${SSH:-ssh -tt} "${hosts[node]}" "cd $(printf %q "$folder") && $(printf '%q ' "${command[@]}")" </dev/null &
  pids+=($!)
done
for _ in "${pids[@]}"; do wait -n; done
