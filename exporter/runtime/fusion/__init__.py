"""What nodes become in memory: several that run as one (link, chain, elementwise, moves), or others in their place (arrange)."""
