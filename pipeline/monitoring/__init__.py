"""How far a running job is."""
