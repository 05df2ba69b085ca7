"""The classes that serving frameworks load. Each framework has a package here; none is imported unless it is used."""
