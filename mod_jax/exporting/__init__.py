"""A trained model as a folder that Hugging Face transformers loads: weights, config, tokenizer, model card."""
