"""The sections of a manifest, one file for each or for a few: their fields and their rules."""
