"""What a model needs of the memory, from its config.json alone: weights, KV cache, tokens that fit.

``config`` reads the file, ``layers`` says what each layer keeps in the cache, ``tensors`` and ``quantisation`` say
how large the weights are, ``pages`` does vLLM's paging, ``estimate`` puts them together, ``table`` shows it.
"""
