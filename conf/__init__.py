"""Hydra configs; a package so that a wheel carries them."""
