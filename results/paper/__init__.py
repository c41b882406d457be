"""Numbers that the StructKV paper prints; a package so that a wheel carries them. See README.md."""
