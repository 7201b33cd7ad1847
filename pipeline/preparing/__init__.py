"""All that is known of a run before a model is loaded."""
