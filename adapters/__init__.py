"""From what a framework has (page tables, token tables, trees) to the engine's layouts."""
