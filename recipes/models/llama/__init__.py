"""Llama and the families that share its block: settings, model, decoder and Hugging Face names."""
