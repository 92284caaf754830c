"""Target engines: generation with the hidden states captured on the way."""
