"""draftmill: train EAGLE-3 draft models with Ray and vLLM."""

__version__ = "0.1.0"
