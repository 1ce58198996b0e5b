"""Channel pruning and 2:4 sparsity: from a simple config to a plan."""
