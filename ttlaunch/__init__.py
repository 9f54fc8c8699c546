"""Start and supervise distributed training from a description of the hardware."""

__version__ = "0.1.0"
