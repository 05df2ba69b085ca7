"""The command ``attnloom``: what is installed, what is planned, what is compiled. One file per command."""
