"""What client and server need to pre-train a language model; nothing here knows Flower."""
