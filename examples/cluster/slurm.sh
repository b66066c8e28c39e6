#!/bin/bash
# A Ray cluster over the nodes of a Slurm job, and a run on it:
#
#   cd examples/recipes && sbatch ../cluster/slurm.sh gsm8k_tool.yaml qwen3.yaml thirty_two_gpus.yaml model.path=Qwen/Qwen3-32B
#
# polyturn, and the files that its config names, must have the same paths on all nodes. The working folder must be on a disk that all
# nodes see: the run is written to runs/slurm-JOB. Ten minutes before the time limit, or when the job is preempted, the run writes a
# checkpoint; the job goes back into the queue and resumes from it.
#SBATCH --job-name=polyturn
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Slurm runs this on the first node, which is the cluster's head.
host=$(hostname --ip-address | cut -d ' ' -f 1)
port=$((10000 + SLURM_JOB_ID % 20000))
srun --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" ray start --head --node-ip-address="$host" --port="$port" --block &
head=$!
until ray health-check --address "$host:$port" >/dev/null 2>&1; do
  kill -0 "$head" # ends the job where Ray did not start
  sleep 1
done
if ((SLURM_JOB_NUM_NODES > 1)); then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" ray start --address="$host:$port" --block &
fi

name=slurm-$SLURM_JOB_ID
resume=()
if compgen -G "runs/$name/checkpoints/step-*" >/dev/null; then resume=(--resume); fi
polyturn train "$@" "name=$name" out=runs --ray "$host:$port" "${resume[@]}" &
run=$!
trap 'kill -TERM "$run"' TERM
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do # a signal ends a wait, not the run
  code=0
  wait "$run" || code=$?
done
if ((code == 128 + 15)); then scontrol requeue "$SLURM_JOB_ID" || true; fi
exit "$code"
