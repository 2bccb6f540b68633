"""The ClientApp: H inner steps of pre-training a round."""
