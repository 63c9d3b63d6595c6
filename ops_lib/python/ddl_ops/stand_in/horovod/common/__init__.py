"""What does not depend on the framework."""
