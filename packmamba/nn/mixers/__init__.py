"""Mixers: what a block does with its tokens."""
