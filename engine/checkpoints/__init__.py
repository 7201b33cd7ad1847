"""Models as files: what they are, how they are read, their tokenizers."""
