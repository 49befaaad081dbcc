"""Packing inside other libraries' models."""
