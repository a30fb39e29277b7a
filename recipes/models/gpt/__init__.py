"""GPT: settings, model, decoder and Hugging Face names."""
