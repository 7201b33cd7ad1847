"""What a run did and cost, for people."""
