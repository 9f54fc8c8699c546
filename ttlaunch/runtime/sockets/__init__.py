"""How two ranks exchange tensors: over MPI, over torch's process group, within one process."""
