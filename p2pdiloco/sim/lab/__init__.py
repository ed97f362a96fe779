"""The algorithm lab: the product's rules, codecs and outer loop on a virtual clock, with any trainer."""
