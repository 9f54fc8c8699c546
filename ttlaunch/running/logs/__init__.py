"""What ranks and mpirun print: kept byte for byte, put in order, folded, shown."""
