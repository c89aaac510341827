"""T5 inside real vLLM on a GPU: is it right, what does it launch, how fast is it? ``scripts/gpu-engine`` runs it."""
