"""What a training step costs on many GPUs, before anything is compiled."""
