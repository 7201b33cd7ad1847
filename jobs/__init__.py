"""What a person or a scheduler starts."""
