"""Folders of Hugging Face models: safetensors files, their index, config.json."""
