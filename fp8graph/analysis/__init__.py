"""Questions about a graph. Nothing here changes the graph."""
