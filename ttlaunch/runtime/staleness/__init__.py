"""Data parallelism in which fast workers may lead: who may begin which step, and the ring that carries several steps at once."""
