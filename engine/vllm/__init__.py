"""The schedule inside vLLM: a plugin for anyone who runs vLLM, and an engine of ours on top of it."""
