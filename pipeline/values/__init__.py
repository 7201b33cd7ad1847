"""Values of any Arrow type, shown, repaired and kept."""
