"""KV-cache compression methods, one file each; scoring.py holds what several share."""
