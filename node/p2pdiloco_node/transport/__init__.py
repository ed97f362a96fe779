"""HTTP between strangers: every address checked, every body with a length, a rate and an end."""
