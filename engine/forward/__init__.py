"""What a pass over the layers does, and what it costs."""
