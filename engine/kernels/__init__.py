"""What the layers are computed with, per device."""
