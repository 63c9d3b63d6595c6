"""Small things that tests import."""
