"""Conversations in, fixed-shape token batches out: a pure function of (data, configuration, seed, index)."""
