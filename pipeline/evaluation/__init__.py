"""What a schedule costs in quality: metrics, rivals, studies on held-out prompts and their report. No Ray."""
