"""Packing inside other people's models. What each needs is imported when it is asked for."""
