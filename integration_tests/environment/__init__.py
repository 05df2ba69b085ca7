"""Setting up the virtual environment that the demo and the tests share."""
