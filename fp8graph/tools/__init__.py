"""Tools: explain, which inspects a model without running it, and the other commands of the shell."""
