"""What a tracker does for everybody besides being a witness: its page's history, checkpoints to download."""
