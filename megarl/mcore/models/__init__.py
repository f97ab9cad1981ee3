"""Models from config.json: families, layers, attention, LoRA, and Transformer Engine's modules under our names."""
