"""Features that no part of the compiler imports: the planner, FP8 caches for keys and values, gradients sent in FP8."""
