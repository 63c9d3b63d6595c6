"""Starting ranks."""
