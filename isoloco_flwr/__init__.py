"""Low-communication pre-training with model merging, for Flower."""
