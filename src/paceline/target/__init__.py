"""The frozen model whose tokens are drafted."""
