"""Mixtures of experts: settings, model, decoder and Hugging Face names."""
