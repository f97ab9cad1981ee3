"""Tensors with Hugging Face names: loading a folder, gathering, exporting, LoRA adapters in PEFT's format."""
