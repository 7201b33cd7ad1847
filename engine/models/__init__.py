"""The decoders, by family."""
