"""What a graph in training does apart from the rest: dropout from a seed, running statistics of BatchNorm."""
