"""Questions about a graph. Nothing is changed."""
