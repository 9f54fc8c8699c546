#!/bin/sh
# 4 ranks by Open MPI 5.0.11; plan 3437e9f5a738.
(
cd @HERE@/runs/2026-11-22T16-40-50-a581 || exit
scratch=$(mktemp -d "${XDG_RUNTIME_DIR:-/tmp}/ttl-XXXXXX") || exit
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' HUP TERM
export OMPI_ALLOW_RUN_AS_ROOT=1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export TMPDIR="$scratch"
export PRTE_MCA_prte_tmpdir_base="$scratch"
export OMPI_MCA_btl_sm_backing_directory="$scratch"
/home/ann/env/bin/mpirun -n 4 --hostfile hosts.txt --map-by rankfile:file=rankfile.txt --bind-to none --mca mpi_yield_when_idle 1 --mca pml ob1 --mca btl self,sm,tcp /home/ann/env/bin/python -I -S @ROOT@/ttlaunch/agent/shim.py plan.json
)
