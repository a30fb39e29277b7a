"""BERT: settings, model and Hugging Face names."""
