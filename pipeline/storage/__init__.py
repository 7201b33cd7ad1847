"""A directory on any store: its objects, its records, who owns it."""
