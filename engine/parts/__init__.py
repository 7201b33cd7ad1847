"""What a schedule is made of: units, and the fitted parts that stand in for them."""
