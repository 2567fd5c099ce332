"""The data that outlives a call: scaling state, copies of weights, names."""
