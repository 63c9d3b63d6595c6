"""What tests import."""
