"""Training of the single-layer EAGLE-3 draft: draft, loss, data, loop, evaluate."""
