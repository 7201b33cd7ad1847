"""Decoding in passes of fixed shapes, recorded once as CUDA graphs."""
