"""Configurations of benches from plain values."""

from omegaconf import OmegaConf

from packmamba.config import resolve


def configured(schema, values, **changes):
    """As the command reads it from a file, rules and all."""
    return resolve(schema, [(OmegaConf.create({**values, **changes}), "the test")])
