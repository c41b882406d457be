"""What some methods measure once per model: the texts, the file that holds it, and the command."""
