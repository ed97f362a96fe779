"""A certified version of a run as a folder that the rest of the world's tools load; without torch."""
