"""Audits: ranks compute each other's micro-batches, and compare 32 bytes."""
