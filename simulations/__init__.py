"""Experiments over real `flwr run` simulations."""
