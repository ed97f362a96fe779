"""A run before it runs: made, described, checked, shown; and what lies where in its folder."""
