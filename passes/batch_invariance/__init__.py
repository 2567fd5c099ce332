"""The same bits in any batch: `refuse_batches` says what cannot be, `fix_order` and, on GPUs, `fix_sums` order sums."""
