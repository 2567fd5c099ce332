"""FP8 checkpoints as files: what is in them, what it means, and how they are written. No models, no graphs."""
