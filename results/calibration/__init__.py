"""Calibrations that `structkv-bench calibrate` wrote; a package, so that a wheel has them."""
