"""ZeRO over the runtime's own messages: who owns which part of the model, and how layers and gradients travel."""
