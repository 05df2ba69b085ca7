"""What variants.py is made of: cases, their times, builds, the lines that users write, and processes."""
