#!/bin/bash
# Trains on several nodes of a Slurm cluster:   sbatch examples/slurm.sh
# srun starts one task for each rank; ourddp.init(), which the example calls, reads the ranks from Slurm's variables.
#SBATCH --job-name=ours
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
set -euo pipefail

# Sbatch runs a copy of this script elsewhere; the folder it was called in is the job's.
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
# If nodes have several networks, name the one that the ranks are to use: an interface, or a network like 10.0.0.0/8.
# export OURS_INTERFACE=ib0
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-4}" "${PYTHON:-.venv/bin/python}" examples/train.py "$@"
